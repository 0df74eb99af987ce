"""A world of the simulation in which nothing is left to chance, and handles by which a test says what goes wrong.

Prefill nodes p0, p1, …, decode nodes d0, d1, … (the first life of each has its name as incarnation), one web process.
What a test hands over or asks for by itself happens at once; everything else as in ``tests.sim``.
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
    Heartbeat,
    Limits,
    Register,
    Scan,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)
from app.protocol.messages import Message, Reply
from app.protocol.tables import TERMINAL
from app.schemas import NodeInfo, SamplingParams
from tests.sim import model
from tests.sim.engine import Chunk, Engine, Sequence
from tests.sim.fates import FINE, ON_TIME, CallFate, Delays
from tests.sim.faults import Faults
from tests.sim.invariants import Checker
from tests.sim.ledger_client import Results
from tests.sim.mover import Mover
from tests.sim.node import KVNode, Role
from tests.sim.pace import Pace, Slowness
from tests.sim.process import Process
from tests.sim.scenario import Scenario, Shape
from tests.sim.times import Times
from tests.sim.wires import Link
from tests.sim.world import World

BLOCK = model.BLOCK_TOKENS
EOS = model.EOS
TICK = 0.001
STEP = 0.01
LIMITS = Limits(
    max_attempts=3, max_queued=100, queue_timeout_ms=60_000, first_token_timeout_ms=20_000, record_ttl_ms=600_000
)
_SEED = 1
_WEB = NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h")
"""Watches all requests; nobody reads its events."""
_BUDGET = 512
_EMIT_BUFFER = 6
_SIGNS_OF_LIFE = (Heartbeat, Register, Scan)


def reference(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The answer of an undisturbed run, computed without any of the code under test."""
    return model.reference(prompt, _SEED, max_tokens, False)


class SteadyPace(Pace):
    """Everything takes the same time always; who is served among equals goes round."""

    def __init__(self) -> None:
        super().__init__(0, Slowness())
        self._turn = 0
        self.choose = self._next

    def _next(self, count: int) -> int:
        self._turn += 1
        return self._turn % count

    def network(self) -> float:
        return TICK

    def thread(self) -> float:
        return 0.0

    def step(self, num_tokens: int) -> float:
        return STEP

    def block(self) -> float:
        return TICK / 4


class Hooks(Faults):
    """Nothing goes wrong but what the test says."""

    def __init__(self, cluster: Cluster, world: World) -> None:
        super().__init__(world, 0, {})
        self._cluster = cluster

    def coin(self) -> bool:
        return False

    def ledger_call(self, who: str, commands: Any) -> CallFate:
        (command,) = commands
        fault = "" if isinstance(command, _SIGNS_OF_LIFE) else self._cluster.ledger_fault(command)
        if not fault:
            return FINE
        return CallFate(None if fault == "lost" else 0.0, 0, 3 * TICK)

    def message(self, message: Message) -> Delays:
        return () if self._cluster.lose_message(message) else ON_TIME

    def bell(self, bell: Bell) -> Delays:
        return () if bell.uid and self._cluster.lose_bell(bell) else ON_TIME


class Unchecked(Checker):
    """These tests say themselves what must hold, and some of them write into the ledger."""

    def applied(self, command: Command, answer: Any, not_after_ms: int) -> None:
        """Nothing is concluded from it."""

    def told(self, web: str, event: Any) -> None:
        """Nothing is concluded from it."""


class HandledEngine(Engine):
    """Asks its runner when a step is over."""

    process: Node

    def _step_ends(self, chunks: list[Chunk]) -> None:
        self.process.runner.chunks = chunks
        self.process.runner.step()


class HandledMover(Mover):
    """Asks its runner to do its jobs, each as soon as it comes: a test may keep one for ever."""

    process: Node

    def put(self, job: do.Seal | do.Pull) -> None:
        self.after(TICK, self._do, job)

    def _do(self, job: do.Seal | do.Pull) -> None:
        if isinstance(job, do.Seal):
            self.process.runner.seal(job)
        else:
            self.process.runner.pull(job)


class HandledLink(Link):
    """May lose the acknowledgement of one kind of message."""

    process: Node

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._asked: dict[tuple[str, int], Message] = {}

    def arrives(self, sender: KVNode, number: int, to: str, deadline: float, message: Message | None) -> None:
        if message is not None:
            self._asked[sender.incarnation, number] = message
        super().arrives(sender, number, to, deadline, message)

    def _reply(self, sender: KVNode, number: int, reply: Reply) -> None:
        if not self.process.runner.cluster.lose_reply(self._asked[sender.incarnation, number]):
            super()._reply(sender, number, reply)


class Node(KVNode):
    """A node whose every part can be taken over by a test."""

    def __init__(self, world: Handled, name: str, life: int, role: Role, shape: Shape) -> None:
        super().__init__(world, name, life, role, shape)
        self.engine = HandledEngine(self, shape.max_num_seqs, shape.max_num_batched_tokens)
        self.mover = HandledMover(self)
        self.link = HandledLink(self)
        self.runner = Runner(world.cluster, self)
        world.cluster.runners[name] = self.runner
        self._perform.update(
            {
                do.Ask: lambda ask: world.cluster.ask(self.runner, ask),
                do.Call: lambda call: world.cluster.deliver(self.runner, call),
                do.Start: lambda job: self.runner.start(job),
                do.Stop: lambda job: self.runner.stop(job),
                do.Seal: self.mover.put,
                do.Pull: self.mover.put,
                do.Register: lambda effect: world.cluster.register(self.runner),
            }
        )

    def _name_life(self, name: str, life: int) -> str:
        return name if life == 1 else super()._name_life(name, life)

    def post(self, event: on.Event) -> None:
        self.runner.feed(event)

    def take(self, event: on.Event) -> None:
        """The machine hears of it now."""
        if self.alive:
            if isinstance(event, on.BellRang):
                self._bells.add(event.bell_id)
            self._inbox.append(event)
            self._look()

    def _reply(self, effect: do.ReplyTo) -> None:
        answer = self.runner.cluster.replies.get(effect.call_id)
        if answer is not None:
            answer(effect.reply)
        else:
            super()._reply(effect)

    def _bell_done(self, effect: do.BellDone) -> None:
        super()._bell_done(effect)
        self.runner.outcomes.append(effect.outcome)

    def _log(self, effect: do.Log) -> None:
        super()._log(effect)
        self.runner.log.append(effect)


class Runner:
    """One life of a node. Each method may be replaced by a test that wants it to go otherwise."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster = cluster
        self.node = node
        self.outcomes: list[str] = []
        """Of the bells whose tasks have ended."""
        self.log: list[do.Log] = []
        self.chunks: list[Chunk] = []

    @property
    def incarnation(self) -> str:
        return self.node.incarnation

    @property
    def machine(self) -> Any:
        """The code under test."""
        return self.node.machine

    @property
    def memory(self) -> list[list[int]]:
        """KV of each position of each block."""
        return self.node.memory.blocks

    @property
    def generations(self) -> list[int]:
        return self.node.memory.generations

    @property
    def sequences(self) -> dict[str, Sequence]:
        """What the engine works on."""
        return self.node.engine._sequences

    @property
    def dead(self) -> bool:
        return not self.node.alive

    @dead.setter
    def dead(self, dead: bool) -> None:
        """Killed, and nobody reports it. The dead do not come back: see ``freeze``."""
        assert dead
        self.node.die()

    def freeze(self) -> None:
        """As by SIGSTOP: it keeps what it has, and what comes in waits."""
        self.node.freeze()

    def thaw(self) -> None:
        self.node.thaw()

    def feed(self, event: on.Event) -> None:
        """Let the machine hear of it at once."""
        self.node.take(event)

    def start(self, job: do.Start) -> None:
        """The engine is given a sequence."""
        self.node.engine.put(job)

    def stop(self, job: do.Stop) -> None:
        """The engine is told to drop a sequence."""
        self.node.engine.put(job)

    def step(self) -> None:
        """The running step ends, for what is still in the engine."""
        there = [(sequence, end) for sequence, end in self.chunks if sequence in self.sequences.values()]
        Engine._step_ends(self.node.engine, there)

    def seal(self, job: do.Seal) -> None:
        """The mover digests blocks."""
        Mover._seal(self.node.mover, job)

    def pull(self, job: do.Pull) -> None:
        """The mover begins to copy a peer's blocks."""
        Mover._open(self.node.mover, job)


class Handled(World):
    """The world of a cluster."""

    def __init__(self, cluster: Cluster, scenario: Scenario) -> None:
        self.cluster = cluster
        super().__init__(scenario)
        self.pace = SteadyPace()
        self.checker = Unchecked(self)

    def _make_node(self, name: str, life: int, role: Role) -> KVNode:
        return Node(self, name, life, role, self.scenario.nodes[name])


class Test(Process):
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
        self._test = Test(self.world, "test")
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

    def submit(self, prompt: tuple[int, ...], max_tokens: int = 10, client: str = "", **limits: int) -> str:
        """Admit a request and ring; returns its uid."""
        uid = self.draw()
        admit = Admit(
            uid=uid,
            client_id=client or uid,
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0, seed=_SEED, max_tokens=max_tokens),
            watcher=Watcher(_WEB.incarnation, uid),
            limits=replace(LIMITS, **limits),
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
