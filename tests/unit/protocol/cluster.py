"""A world of the simulation in which nothing is left to chance, and handles by which a test says what goes wrong.

Prefill nodes p0, p1, …, decode nodes d0, d1, …; the first life of each has its name as incarnation. What a test hands
over or asks for by itself happens at once; everything else as in ``tests.sim``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from app.errors import LedgerError
from app.ledger.memory.state import Store
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import (
    Admit,
    AdmitStatus,
    Bell,
    Command,
    Limits,
    Register,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)
from app.protocol.messages import Message, Reply
from app.protocol.tables import TERMINAL
from app.schemas import NodeInfo, SamplingParams
from tests.sim import model
from tests.sim.ledger_client import Results
from tests.sim.pace import Slowness
from tests.sim.process import Process
from tests.sim.scenario import Scenario, Shape
from tests.sim.times import Times
from tests.sim.world import World
from tests.unit.protocol.runner import Handled, Runner
from tests.unit.protocol.steady import TICK, Hooks

__all__ = ["EOS", "LIMITS", "TICK", "Cluster", "Runner", "reference"]

EOS = model.EOS
LIMITS = Limits(
    max_attempts=3, max_queued=100, queue_timeout_ms=60_000, first_token_timeout_ms=20_000, record_ttl_ms=600_000
)
_SEED = 1
_WEB = NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h")
"""Watches all requests; nobody reads its events."""
_BUDGET = 512
_EMIT_BUFFER = 6


def reference(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The answer of an undisturbed run, computed without any of the code under test."""
    return model.reference(prompt, _SEED, max_tokens, False)


class Later(Process):
    """Does what the test has put off."""

    def do(self, what: Callable[[], object]) -> None:
        what()


class Ledger:
    """The ledger's server, for what a test asks it by itself."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def store(self) -> Store:
        return self._world.ledger.store

    def time_ms(self) -> int:
        return self._world.ledger.time_ms()

    def execute(self, command: Command) -> Any:
        return self.apply(command, self.time_ms() + 5000)

    def apply(self, command: Command, not_after_ms: int) -> Any:
        return self._world.ledger.apply("test", command, not_after_ms)

    def save(self) -> Store:
        """A copy of everything."""
        return copy.deepcopy(self._world.ledger.store)

    def restore(self, saved: Store) -> None:
        """Continue from a copy, in another life of the server."""
        server = self._world.ledger
        server.crash()
        server._twin.store = copy.deepcopy(saved)
        server.restart()


class Cluster:
    """``prefill`` and ``decode`` nodes and one ledger."""

    def __init__(self, prefill: int = 1, decode: int = 1, num_blocks: int = 16, max_num_seqs: int = 8) -> None:
        self.lose_bell: Callable[[Bell], bool] = lambda bell: False
        self.lose_message: Callable[[Message], bool] = lambda message: False
        self.lose_reply: Callable[[Message], bool] = lambda message: False
        self.ledger_fault: Callable[[Command], str] = lambda command: ""
        """Of what a machine asks: "" = none, "lost" = never applied, "unanswered" = applied, but the answer is lost."""
        self.runners: dict[str, Runner] = {}
        """The newest life of each node, by name."""
        self.replies: dict[str, Callable[[Reply], None]] = {}
        """What hears the acknowledgement of a message that a test has made up, by its call id."""
        self.sent: list[Message] = []
        names = [*(f"p{number}" for number in range(prefill)), *(f"d{number}" for number in range(decode))]
        self._nodes = dict.fromkeys(names, Shape(num_blocks, max_num_seqs, _BUDGET, _EMIT_BUFFER))
        self.world = Handled(self, _scenario(self._nodes))
        self.world.faults = Hooks(self, self.world)
        self.ledger = Ledger(self.world)
        self._test = Later(self.world, "test")
        self.ledger.execute(Register(_WEB, 10_000_000))
        self.world.run(5 * TICK)

    def _add(self, role: str, name: str, num_blocks: int, max_num_seqs: int) -> None:
        """Start another node, or the next life of one."""
        self._nodes[name] = Shape(num_blocks, max_num_seqs, _BUDGET, _EMIT_BUFFER)
        self.world.start(name)

    # what may be replaced

    def ask(self, runner: Runner, question: do.Ask) -> None:
        """A machine asks the ledger."""
        runner.node.client.call((question.command,), partial(self._answered, runner, question))

    @staticmethod
    def _answered(runner: Runner, question: do.Ask, results: Results) -> None:
        answer = results[0]
        failed = isinstance(answer, LedgerError)
        runner.feed(on.AskFailed(question.tag, "fault") if failed else on.Answered(question.tag, answer))

    def deliver(self, sender: Runner, call: do.Call) -> None:
        """A machine calls a peer."""
        self.sent.append(call.message)
        sender.node.link.call(call)

    def register(self, runner: Runner) -> None:
        """A machine wants to be in the ledger again."""
        runner.node.beats.register()

    def check(self) -> None:
        """After every happening: no block is lost or held twice."""
        for runner in self.runners.values():
            runner.machine.audit()

    # time

    @property
    def now(self) -> float:
        return self.world.timeline.now

    def draw(self) -> str:
        return self._test.draw()

    def after(self, in_s: float, what: Callable[[], object]) -> None:
        """Do something in ``in_s`` seconds."""
        self._test.after(in_s, self._test.do, what)

    def run(self, until: Callable[[], bool] | None = None, limit_s: float = 60.0) -> None:
        """Run until the condition holds (or, without one, for ``limit_s``); it must hold within ``limit_s``."""
        end = self.now + limit_s
        while (what := self.world.timeline.pop(end)) is not None:
            self.world.happen(what)
            self.check()
            if until is not None and until():
                return
        if until is not None:
            raise AssertionError(f"not reached in {limit_s} s: {[r.machine.table for r in self.runners.values()]}")

    # requests

    def submit(
        self, prompt: tuple[int, ...], max_tokens: int = 10, client: str = "", salt: str = "", **limits: int
    ) -> str:
        """Admit a request and ring; returns its uid."""
        uid = self.draw()
        admit = Admit(
            uid=uid,
            client_id=client or uid,
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0, seed=_SEED, max_tokens=max_tokens),
            watcher=Watcher(_WEB.incarnation, uid),
            limits=replace(LIMITS, **limits),
            salt=salt,
        )
        answer = self.ledger.execute(admit)
        assert answer.status is AdmitStatus.ADMITTED, answer
        self.ring(Bell("prefill", uid, 1))
        return uid

    def ring(self, bell: Bell) -> None:
        """Ring on a role's queue."""
        self.world.broker.ring(self._test, bell)

    def snapshot(self, uid: str) -> SnapshotAnswer:
        answer: SnapshotAnswer = self.ledger.execute(Snapshot(uid=uid))
        return answer

    def ended(self, *uids: str) -> Callable[[], bool]:
        return lambda: all(self.ledger.store.records[uid].state in TERMINAL for uid in uids)

    def at_baseline(self) -> bool:
        """All blocks free, nothing in any table."""
        living = [runner for runner in self.runners.values() if not runner.dead]
        return all(one.machine.idle and one.machine.pool.free == one.machine.pool.num_blocks for one in living)


def _scenario(nodes: dict[str, Shape]) -> Scenario:
    return Scenario(
        seed=0,
        nodes=nodes,
        webs=0,
        wishes=(),
        poison=frozenset(),
        rates={},
        disasters=(),
        times=Times(grant_timeout_s=30.0, scan_s=0.5, pull_min_blocks_per_s=1000.0),
        slowness=Slowness(),
        ledger_lanes=1,
        one_host=True,
        one_server=True,
        exits_reported=0.0,
    )
