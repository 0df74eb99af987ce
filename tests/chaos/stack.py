"""One cluster with failpoints for all chaos tests, what is done to it, and that it is well again afterwards."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from redis import Redis

from tests.chaos.baseline import Usage, grown, in_use, left_in_ledger, usages
from tests.chaos.clients import GREEDY, Expected, Stream, greedy, sampled, undisturbed
from tests.integration.baton import START_S, Baton
from tests.waiting import wait_for
from workers.failpoints.orders import ARMED, Action, Order

OPTIONS = ("--prefill", "2", "--decode", "2", "--num-blocks", "320", "--max-num-seqs", "32")
CHUNKS = ("--max-num-batched-tokens", "32")
"""Prompts of 34 tokens and more are then computed in several chunks."""
NODES = {"prefill1", "prefill2", "decode1", "decode2", "control1", "web"}
MORE = 20
_MORE_TOKENS = 4
CANARY_TOKENS = 36
TWIN_TOKENS = 4
_CALM_S = 15.0
"""Until everything is back once all nodes serve: closed connections are noticed, blocks reported with a heartbeat."""


class Stack:
    """A running `baton up` whose workers take orders from ``orders``."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.orders = folder / "orders"
        self.orders.mkdir()
        self.baton = Baton(home, folder / "output", *OPTIONS, *CHUNKS, BATON_FAILPOINTS=str(self.orders))
        self._numbers = itertools.count(1)
        self.canary_answers: list[tuple[dict[str, Any], Expected]] = []
        self.usages: dict[str, Usage] = {}

    def start(self) -> None:
        self.baton.wait_until_ready()
        self.redis = Redis.from_url(self.baton.find(r"Redis +(\S+)"), decode_responses=True)
        for request in (greedy(2, CANARY_TOKENS), sampled(3, 5, CANARY_TOKENS)):
            self.canary_answers.append((request, undisturbed(self.baton, request)))
        short = greedy(9, TWIN_TOKENS)
        self.twin_answer = (short, undisturbed(self.baton, short))
        assert self.canary_answers[0][1].token_ids == GREEDY[2]["output_ids"][:CANARY_TOKENS]
        self.serve_more(2 * MORE)  # every pair of nodes has talked, most lazy threads are there
        self.note_usages()

    def note_usages(self) -> None:
        """What is open from now on is the baseline: web keeps a thread for each client that was there at once."""
        self.wait_idle()
        self.usages = usages(self.baton)

    def close(self) -> None:
        self.baton.stop()

    # faults

    def arm(self, order: Order) -> None:
        for left in self.orders.iterdir():
            left.unlink()
        new = self.orders / "new"
        new.write_text(order.model_dump_json())
        new.rename(self.orders / ARMED)

    def wait_taken(self, action: Action, within_s: float) -> int:
        """The process that has taken the order and, if that was to stop, stands there."""
        found: list[int] = []

        def taken() -> bool:
            found[:] = [int(path.name.rsplit("-", 1)[1]) for path in self.orders.glob(f"{action}-*")]
            return bool(found)

        wait_for(taken, within_s, f"nobody came by: {self.orders}")
        if action is Action.STOP:
            process = psutil.Process(found[0])
            wait_for(lambda: process.status() == psutil.STATUS_STOPPED, 5, f"{process} does not stop")
        return found[0]

    def disarm(self) -> bool:
        """Take the order back; False when somebody has taken it."""
        try:
            (self.orders / ARMED).unlink()
        except FileNotFoundError:
            return False
        return True

    def lift(self) -> None:
        """Mend every link; nothing is armed any more."""
        for left in self.orders.iterdir():
            left.unlink()

    @contextmanager
    def nobody_sees_exits(self) -> Iterator[None]:
        """While the launcher is frozen, a worker that dies is a worker without a supervisor."""
        os.kill(self.baton.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.baton.process.pid, signal.SIGCONT)

    # load

    def name(self, what: str) -> str:
        return f"{what}-{next(self._numbers)}"

    def canaries(self) -> list[tuple[Stream, Expected]]:
        """Long answers, at least one under way on each decode node."""
        running: list[tuple[Stream, Expected]] = []
        wanted = {name for name in NODES if name.startswith("decode")}
        while {self.node_of(stream.request_id, "decode") for stream, _ in running} < wanted:
            assert len(running) < 12, "all canaries are on one decode node"
            request, expected = self.canary_answers[len(running) % 2]
            stream = Stream(self.baton, self.name("canary"), request).start()
            running.append((stream, expected))
            wait_for(partial(self._is_decoding, stream), 60, "a canary does not start")
        return running

    def twins(self) -> list[tuple[Stream, Expected]]:
        """Two short requests, just sent: they are in the pools of prefill nodes."""
        request, expected = self.twin_answer
        return [(Stream(self.baton, self.name("twin"), request).start(), expected) for _ in range(2)]

    def _is_decoding(self, stream: Stream) -> bool:
        under_way = stream.token_ids and self.node_of(stream.request_id, "decode")
        return bool(under_way or stream.ended.is_set())

    def node_of(self, request_id: str, role: str) -> str:
        return str(self.baton.get(f"/v1/requests/{request_id}")[1]["nodes"][role] or "").split("@")[0]

    def serve_more(self, number: int = MORE) -> None:
        """So many short requests at once, each exact."""
        cases = [each % len(GREEDY) for each in range(number)]

        def serve(case: int) -> list[int]:
            return undisturbed(self.baton, greedy(case, min(_MORE_TOKENS, len(GREEDY[case]["output_ids"])))).token_ids

        with ThreadPoolExecutor(number) as pool:
            answers = list(pool.map(serve, cases))
        assert answers == [GREEDY[case]["output_ids"][:_MORE_TOKENS] for case in cases]

    # afterwards

    def wait_idle(self) -> None:
        """Every node serves, and nothing is in use."""
        wait_for(lambda: self.baton.nodes().keys() >= NODES - {"web"}, START_S, "a node does not come back")
        wait_for(lambda: not in_use(self.baton), _CALM_S, lambda: f"still in use: {in_use(self.baton)}")
        wait_for(
            lambda: not left_in_ledger(self.redis), _CALM_S, lambda: f"left in Redis: {left_in_ledger(self.redis)}"
        )

    def wait_baseline(self) -> None:
        """As before the fault: blocks, leases, keys, threads, sockets."""
        self.wait_idle()
        wait_for(
            lambda: not grown(self.usages, usages(self.baton)),
            _CALM_S,
            lambda: f"more open than before: {grown(self.usages, usages(self.baton))}",
        )
