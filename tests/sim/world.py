"""The world: a cluster and its clients, all that is still to come, and how each happening is done. One thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from app.protocol import effects as do
from app.protocol.messages import Reply
from tests.sim.broker import Broker
from tests.sim.client import Clients, Wish
from tests.sim.control import Beat, Control
from tests.sim.disasters import Disasters
from tests.sim.faults import Fault, Faults
from tests.sim.invariants import Checker, Violation
from tests.sim.kv_memory import KVMemory
from tests.sim.ledger_server import LedgerServer
from tests.sim.node import KVNode, Role
from tests.sim.pace import Pace
from tests.sim.process import Process
from tests.sim.scenario import Scenario
from tests.sim.supervisor import Supervisor
from tests.sim.timeline import Happening, Timeline
from tests.sim.web import Web
from tests.sim.wires import Wires

Note = tuple[float, str, str, str, tuple[Any, ...]]
"""When, who, what, of which request, and with what."""


class World:
    """Built from a scenario; ``happen`` does one happening, ``run`` those up to a moment."""

    def __init__(self, scenario: Scenario) -> None:
        seed = scenario.seed
        self.scenario = scenario
        self.times = scenario.times
        self.one_host = scenario.one_host
        self.one_server = scenario.one_server
        self.ties = Fault.TOKEN_TIED in scenario.rates
        """Whether a token may be another one when it is drawn again."""
        self.timeline = Timeline()
        self.notes: list[Note] = []
        self.counts: Counter[str] = Counter()
        """How often each fault struck, each refusal and each failure reason occurred."""
        self.outcomes: Counter[str] = Counter()
        self.pace = Pace(seed, scenario.slowness)
        self.faults = Faults(self, seed, scenario.rates)
        self.wires = Wires(self)
        self.checker = Checker(self)
        self.ledger = LedgerServer(self)
        self.broker = Broker(self)
        self.supervisor = Supervisor(self, seed, scenario.exits_reported)
        self.computed_from: dict[str, int] = {}
        """The first position that an engine has computed, by fence."""
        self._lives: Counter[str] = Counter()
        self._current: dict[str, Process] = {}
        self._memories: dict[str, KVMemory] = {}
        self._died_at: dict[str, float] = {}
        self._cut_off: Counter[str] = Counter()
        self._held_calls: list[tuple[str, Happening]] = []
        for name in (*(f"w{n}" for n in range(scenario.webs)), *scenario.nodes, "c0", "beat"):
            self.start(name)
        self.clients = Clients(self, scenario.wishes)
        self.disasters = Disasters(self, seed, scenario.disasters)

    # time

    def clock(self) -> float:
        return self.timeline.now

    @staticmethod
    def happen(what: Happening) -> None:
        """Do one happening, if its process runs."""
        what.func.__self__.process.perform(what)  # type: ignore[attr-defined]

    def run(self, until: float) -> None:
        """Do what happens up to a moment."""
        timeline, happen = self.timeline, self.happen
        while (what := timeline.pop(until)) is not None:
            happen(what)

    # processes

    def start(self, name: str) -> None:
        """Start the next life of a process."""
        self._lives[name] += 1
        life = self._lives[name]
        process: Process
        if name in self.scenario.nodes:
            process = self._make_node(name, life, "prefill" if name.startswith("p") else "decode")
            self._memories[process.incarnation] = process.memory
            process.beats.start()
        elif name == "beat":
            process = Beat(self, name, life)
            process.start()
        else:
            process = Web(self, name, life) if name.startswith("w") else Control(self, name, life)
            process.beats.start()
        self._current[name] = process
        self.note(process.incarnation, "starts", "")

    def _make_node(self, name: str, life: int, role: Role) -> KVNode:
        return KVNode(self, name, life, role, self.scenario.nodes[name])

    def end_process(self, process: Process, why: str) -> None:
        """A process ends; its supervisor sees it, and so does, with luck, who waits for its answer."""
        if not process.alive:
            return
        self.note(process.incarnation, "ends", "", why)
        self.count(f"ends: {why}")
        process.die()
        self._died_at[process.incarnation] = self.timeline.now
        if isinstance(process, KVNode):
            del self._memories[process.incarnation]
            for node in self.nodes():
                if self.faults.coin() and not self.wires.is_cut(node.name, process.name):
                    node.after(self.pace.network(), node.link.lost, process)
        self.supervisor.ended(process)

    def current(self, name: str) -> Process:
        """The newest life of a process; it may have ended."""
        return self._current[name]

    def died_at(self, incarnation: str) -> float | None:
        """When a process ended; None if it has not."""
        return self._died_at.get(incarnation)

    def running(self) -> Iterator[Process]:
        """Every process that lives, frozen ones too."""
        return (process for process in self._current.values() if process.alive)

    def nodes(self) -> list[KVNode]:
        """Every KV node that lives."""
        return [process for process in self._current.values() if isinstance(process, KVNode) and process.alive]

    def node_at(self, address: str) -> KVNode | None:
        """Who listens at an address."""
        process = self._current.get(address)
        return process if isinstance(process, KVNode) and process.alive else None

    def memory_of(self, incarnation: str) -> KVMemory | None:
        """The KV blocks of a process that lives."""
        return self._memories.get(incarnation)

    def wake_webs(self) -> None:
        """The ledger has appended events."""
        for process in self._current.values():
            if isinstance(process, Web) and process.alive:
                process.wake_reader()

    # the way to the ledger

    def cut_off(self, name: str) -> bool:
        return bool(self._cut_off) and self._cut_off[name] > 0

    def cut_off_from_ledger(self, name: str) -> None:
        """No call of this process arrives. Such cuts add up."""
        self._cut_off[name] += 1

    def hold_call(self, name: str, call: Happening) -> None:
        """The kernel keeps a call until the connection is back."""
        self._held_calls.append((name, call))

    def reconnect_to_ledger(self, name: str) -> None:
        """Undo one cut; what was kept arrives now, however late."""
        self._cut_off[name] -= 1
        if self._cut_off[name] > 0:
            return
        held, self._held_calls = self._held_calls, []
        for whose, call in held:
            if whose == name:
                self.timeline.at(self.timeline.now, call)
            else:
                self._held_calls.append((whose, call))

    # requests

    def submitted(self, uid: str, wish: Wish) -> None:
        """Web is about to admit ``wish`` as ``uid``."""
        self.checker.submitted(uid, wish)
        if wish.client_id in self.scenario.poison:
            self.faults.poison.add(uid)

    # what is written down

    def note(self, who: str, what: str, uid: str, *details: Any) -> None:
        """Write a line of the trace."""
        self.notes.append((self.timeline.now, who, what, uid, details))

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def count_outcome(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def count_log(self, log: do.Log) -> None:
        """Failure reasons and refusals of the machines."""
        if log.event == "attempt failed":
            self.count(f"failed: {log.fields['reason']}")
        elif log.event == "refused":
            self.count(f"refused: {log.fields['reason']}")

    def refused(self, name: str, reply: Reply) -> None:
        """A link has refused a message by itself."""
        self.count(f"refused: {reply.reason}")
        self.note(name, "refuses a message", "", reply)

    def violation(self, what: str, uid: str = "") -> Violation:
        """Something that must never happen; raise what this returns."""
        self.note("", "VIOLATION", uid, what)
        return Violation(what, uid)
