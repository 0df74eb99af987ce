"""A node of the simulation whose every part a test can take over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.messages import Message, Reply
from tests.sim.engine import Chunk, Engine, Sequence
from tests.sim.mover import Job, Mover
from tests.sim.node import KVNode, Role
from tests.sim.scenario import Scenario, Shape
from tests.sim.wires import Link
from tests.sim.world import World
from tests.unit.protocol.steady import TICK, SteadyPace, Unchecked

if TYPE_CHECKING:
    from tests.unit.protocol.cluster import Cluster


class HandledEngine(Engine):
    """Asks its runner when a step is over."""

    process: Node

    def _step_ends(self, chunks: list[Chunk]) -> None:
        self.process.runner.chunks = chunks
        self.process.runner.step()


class HandledMover(Mover):
    """Asks its runner to do its jobs, each as soon as it comes: a test may keep one for ever."""

    process: Node

    def put(self, job: Job) -> None:
        self.after(TICK, self._do, job)

    def _do(self, job: Job) -> None:
        if isinstance(job, do.Pull):
            self.process.runner.pull(job)
        else:
            self.process.runner.seal(job)


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
                do.Extend: lambda job: self.runner.extend(job),
                do.Stop: lambda job: self.runner.stop(job),
                do.Seal: self.mover.put,
                do.Check: self.mover.put,
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

    def extend(self, job: do.Extend) -> None:
        """The engine is given more blocks for a sequence."""
        self.node.engine.put(job)

    def stop(self, job: do.Stop) -> None:
        """The engine is told to drop a sequence."""
        self.node.engine.put(job)

    def step(self) -> None:
        """The running step ends, for what is still in the engine."""
        there = [(sequence, end) for sequence, end in self.chunks if sequence in self.sequences.values()]
        Engine._step_ends(self.node.engine, there)

    def seal(self, job: do.Seal | do.Check) -> None:
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
