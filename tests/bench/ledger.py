"""What the ledger costs on an embedded Valkey: ``python -m tests.bench.ledger [--live N] [--rounds N] [--tokens N]``.

Two servers, one with ten requests and one with 100,000 live ones (half of them with leases, hundreds of nodes), are
asked the same in turn; the nodes that ask have 32 holdings each. For each script: the time of a whole call, and the
time that the server spent in it (its slow log), p50 of each, and the ratio of the two servers. Then the server's CPU
time per token. Ends non-zero if a script costs more than twice as much when the ledger is full.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from app.ledger.scripts import load_scripts
from app.protocol.commands import (
    Activate,
    Claim,
    Command,
    Emit,
    FailAttempt,
    FailureKind,
    Heartbeat,
    Holdings,
    ReserveNext,
    Scan,
    Snapshot,
    Stamp,
)
from app.schemas import Gauges
from app.valkey import EmbeddedValkey
from tests.bench.ledger_fill import HELD, Store, admission, fill, hold

SMALL = 10
MOST = 2.0
STEP = 8
"""Sequences of one decode step: their tokens travel in one round trip."""


class Life:
    """The commands of one request's life on one store, a round at a time; leaves the store as it was."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ms: dict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, command: Command) -> Any:
        began = time.perf_counter()
        answer = self.store.ledger.execute(command)
        self.ms[name].append((time.perf_counter() - began) * 1000)
        return answer

    def round(self) -> Iterator[None]:
        """Yields after each call, so that two stores can take turns."""
        admit = admission()
        uid, fence = admit.uid, f"f-{admit.uid}"
        self.timed("admit", admit)
        yield
        self.timed("claim", Claim(uid, "p", fence, 1_000, 16))
        yield
        self.timed("stamp", Stamp(uid, 1, fence, "p", in_step=True))
        yield
        self.timed("reserve_next", ReserveNext(uid, "d", fence, 1_000_000, 16))
        yield
        self.timed("emit", Emit(uid, 1, fence, "p", 0, (7,)))
        yield
        self.timed("activate", Activate(uid, 1, fence, fence, "d", 0, 7))
        for index in range(1, 4):
            yield
            self.timed("emit", Emit(uid, 1, fence, "d", index, (7,)))
        yield
        self.timed("snapshot", Snapshot(uid))
        yield
        self.timed("emit", Emit(uid, 1, fence, "d", 4, (7,), "stop"))
        yield
        oldest = self.timed("claim", Claim("", "p", f"{fence}-2", 1_000, 16)).work
        yield
        failed = FailAttempt(
            oldest.uid, oldest.attempt, oldest.fence, "p", "", FailureKind.OVERLOAD, "grant_timeout", ""
        )
        self.timed("fail_attempt", failed)
        self.store.mute(oldest.uid)
        yield
        self.timed("holdings", Holdings("p"))
        yield
        self.timed("holdings", Holdings("d"))
        yield
        self.store.hold_time()
        self.timed("heartbeat", Heartbeat("p", Gauges(blocks={"FREE": 10, "HELD": 20})))

    def scan(self) -> None:
        """One that finds nothing."""
        self.store.hold_time()
        answer = self.timed("scan", Scan(0))
        if answer.bells or answer.expired or answer.recovered or answer.more:
            raise RuntimeError(f"the scan found something: {answer}")


@contextmanager
def opened(folder: Path, live: int) -> Iterator[Store]:
    server = EmbeddedValkey(folder)
    server.start()
    try:
        store = Store(server.url)
        began = time.perf_counter()
        fill(store, live)
        hold(store)
        print(f"{live} live requests loaded in {time.perf_counter() - began:.1f} s")
        yield store
        store.close()
    finally:
        server.stop()


def script_us(store: Store) -> dict[str, list[int]]:
    """The time that the server spent in each script, as its slow log tells."""
    names = {script.sha.encode(): name for name, script in load_scripts().items()}
    found = defaultdict(list)
    for entry in store.raw.slowlog_get(1_000_000):
        words = entry["command"].split(b" ", 2)
        if words[0] == b"EVALSHA":
            found[names[words[1]]].append(entry["duration"])
    return found


def compare(small: Store, full: Store, rounds: int) -> bool:
    """Prints the table; answers whether every script keeps within the limit."""
    lives = (Life(small), Life(full))
    for _ in range(max(1, rounds // 10)):  # warm up
        _take_turns(lives)
    for life in lives:
        life.ms.clear()
        life.store.raw.config_set("slowlog-max-len", 1_000_000)
        life.store.raw.slowlog_reset()
        life.store.raw.config_set("slowlog-log-slower-than", 0)
    for _ in range(rounds):
        _take_turns(lives)
    for life in lives:
        life.store.raw.config_set("slowlog-log-slower-than", -1)
    small_us, full_us = (script_us(life.store) for life in lives)
    print(f"\n{'p50 of':14} {'call, ms':>18} {'script, us':>18}")
    print(f"{'':14} {'empty':>8} {'full':>9} {'empty':>8} {'full':>9} {'ratio':>6}   ({HELD} holdings)")
    within = True
    for name, ms in lives[0].ms.items():
        call = (statistics.median(ms), statistics.median(lives[1].ms[name]))
        script = (statistics.median(small_us[name]), statistics.median(full_us[name]))
        ratio = script[1] / script[0]
        within = within and ratio <= MOST
        print(f"{name:14} {call[0]:8.3f} {call[1]:9.3f} {script[0]:8.0f} {script[1]:9.0f} {ratio:6.2f}")
    return within


def _take_turns(lives: tuple[Life, Life]) -> None:
    for _ in zip(lives[0].round(), lives[1].round(), strict=True):
        pass
    for life in lives:
        life.scan()


def cpu_s(store: Store) -> float:
    used = store.raw.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def per_token(store: Store, tokens: int) -> None:
    """CPU time of the server for ``tokens`` tokens of ``STEP`` answers, sent one by one and as a decode step does."""
    works = []
    for _ in range(STEP):
        admit = admission()
        store.ledger.execute(admit)
        works.append(store.ledger.execute(Claim(admit.uid, "p", f"f-{admit.uid}", 1_000, 16)).work)
    for title, size in (("one by one", 1), (f"{STEP} per round trip", STEP)):
        lengths = {work.uid: store.ledger.execute(Snapshot(work.uid)).output_ids for work in works}
        index = len(lengths[works[0].uid])
        cpu, began = cpu_s(store), time.perf_counter()
        for step in range(tokens // STEP):
            emits = [Emit(work.uid, 1, work.fence, "p", index + step, (step % 50_000,)) for work in works]
            for start in range(0, STEP, size):
                store.ledger.execute_many(emits[start : start + size])
        took, cpu = time.perf_counter() - began, cpu_s(store) - cpu
        print(f"  {title:18} {cpu / tokens * 1e6:6.1f} us of server CPU per token, {tokens / took:8.0f} tokens/s")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=100_000, help="requests in process on the full server")
    parser.add_argument("--rounds", type=int, default=500, help="lives of a request that are measured")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens emitted for the CPU time")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        small = stack.enter_context(opened(Path(folder) / "small", SMALL))
        full = stack.enter_context(opened(Path(folder) / "full", options.live))
        within = compare(small, full, options.rounds)
        for title, store in (("empty", small), ("full", full)):
            print(f"\n{options.tokens} tokens, {title}:")
            per_token(store, options.tokens)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
