"""What strikes at a moment and lasts: crashes, freezes, cuts, drains, stuck parts, a ledger that is away or reset."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.node import KVNode
from tests.sim.process import Process, State

if TYPE_CHECKING:
    from tests.sim.timeline import Happening
    from tests.sim.world import World


class Disaster(StrEnum):
    NODE_CRASHES = "node crashes"
    NODE_FREEZES = "node freezes"
    NODE_DRAINS = "node drains"
    ENGINE_STUCK = "engine stuck"
    MOVER_STUCK = "mover stuck"
    LINK_CUT = "link between two nodes cut"
    NODE_CUT = "all links of a node cut"
    NODE_CUT_OFF = "node cut off from the ledger"
    WEB_CRASHES = "web crashes"
    WEB_FREEZES = "web freezes"
    CONTROL_CRASHES = "control crashes"
    BEAT_DIES = "beat dies"
    LEDGER_FREEZES = "ledger freezes"
    LEDGER_RESTARTS = "ledger restarts"
    LEDGER_ROLLS_BACK = "ledger restarts without its last writes"
    LEDGER_READ_ONLY = "ledger refuses writes"
    CLOCK_STEPS = "ledger's clock steps"
    CLOCK_STOPS = "ledger's clock stands still"
    BROKER_RESTARTS = "broker restarts empty"


_STEPS_MS = (-7_200_000, -60_000, -3000, -400, 400, 3000, 60_000, 7_200_000)


class Disasters(Process):
    """Strikes as ``plan`` says, until ``stop``; then everything is repaired."""

    def __init__(self, world: World, seed: object, plan: tuple[tuple[float, Disaster], ...]) -> None:
        super().__init__(world, "disasters")
        self._rng = Random(f"{seed}/disasters")
        self._active = True
        self._repairs: dict[int, Happening] = {}
        self._strikes: dict[Disaster, Callable[[], str]] = {
            Disaster.NODE_CRASHES: self._crash_node,
            Disaster.NODE_FREEZES: self._freeze_node,
            Disaster.NODE_DRAINS: self._drain_node,
            Disaster.ENGINE_STUCK: self._engine_stuck,
            Disaster.MOVER_STUCK: self._mover_stuck,
            Disaster.LINK_CUT: self._cut_link,
            Disaster.NODE_CUT: self._cut_node,
            Disaster.NODE_CUT_OFF: self._cut_off,
            Disaster.WEB_CRASHES: self._crash_web,
            Disaster.WEB_FREEZES: self._freeze_web,
            Disaster.CONTROL_CRASHES: self._crash_control,
            Disaster.BEAT_DIES: self._crash_beat,
            Disaster.LEDGER_FREEZES: self._freeze_ledger,
            Disaster.LEDGER_RESTARTS: self._restart_ledger,
            Disaster.LEDGER_ROLLS_BACK: self._roll_ledger_back,
            Disaster.LEDGER_READ_ONLY: self._refuse_writes,
            Disaster.CLOCK_STEPS: self._step_clock,
            Disaster.CLOCK_STOPS: self._stop_clock,
            Disaster.BROKER_RESTARTS: self._restart_broker,
        }
        for when, kind in plan:
            self.after(when, self._strike, kind)

    def stop(self) -> None:
        """No more of it: whatever still lasts ends now. A job that is stuck stays so: the watchdog ends its process."""
        self._active = False
        for node in self.world.nodes():
            for part in (node.engine, node.mover):
                part.stuck = part.stuck and part.entered_at is not None
        for number in list(self._repairs):
            self._repair(number)

    def _strike(self, kind: Disaster) -> None:
        if not self._active:
            return
        whom = self._strikes[kind]()
        if whom:
            self.world.count(kind)
            self.world.note(whom, "disaster", "", kind)

    def _repair_after(self, in_s: float, what: Callable[..., None], *args: Any) -> None:
        self._drawn += 1
        self._repairs[self._drawn] = partial(what, *args)
        self.after(in_s, self._repair, self._drawn)

    def _repair(self, number: int) -> None:
        repair = self._repairs.pop(number, None)
        if repair is not None:
            whose = repair.func.__self__  # type: ignore[attr-defined]
            self.world.note(getattr(whose, "name", ""), f"repaired: {repair.func.__name__}", "", *repair.args)
            repair()

    # whom it strikes

    def _node(self) -> KVNode | None:
        """Mostly one that has work: there is more to be lost."""
        nodes = [node for node in self.world.nodes() if node.state is State.RUNNING]
        busy = [node for node in nodes if node.machine.table]
        if busy and self._rng.random() < 0.8:
            return self._rng.choice(busy)
        return self._rng.choice(nodes) if nodes else None

    def _named(self, first: str) -> Process | None:
        processes = [
            process
            for process in self.world.running()
            if process.name.startswith(first) and process.state is State.RUNNING
        ]
        return self._rng.choice(processes) if processes else None

    def _while(self) -> float:
        """How long it lasts: too short to be noticed, or some timeouts long, or longer than a node may be silent."""
        low, high = self._rng.choice(((0.01, 0.5), (0.5, 3.0), (3.0, 6.0), (5.5, 8.0)))
        return self._rng.uniform(low, high)

    # processes

    def _crash(self, process: Process | None, why: str = "fault: killed") -> str:
        if process is None:
            return ""
        self.world.end_process(process, why)
        return process.incarnation

    def _freeze(self, process: Process | None) -> str:
        if process is None:
            return ""
        process.freeze()
        self._repair_after(self._while(), process.thaw)
        return process.incarnation

    def _crash_node(self) -> str:
        return self._crash(self._node())

    def _freeze_node(self) -> str:
        return self._freeze(self._node())

    def _crash_web(self) -> str:
        return self._crash(self._named("w"))

    def _freeze_web(self) -> str:
        return self._freeze(self._named("w"))

    def _crash_control(self) -> str:
        return self._crash(self._named("c"))

    def _crash_beat(self) -> str:
        return self._crash(self._named("beat"))

    def _drain_node(self) -> str:
        node = self._node()
        if node is None or node.leaving:
            return ""
        node.drain()
        return node.incarnation

    def _engine_stuck(self) -> str:
        node = self._node()
        if node is None:
            return ""
        node.engine.get_stuck()
        return node.incarnation

    def _mover_stuck(self) -> str:
        node = self._node()
        if node is None:
            return ""
        node.mover.get_stuck()
        return node.incarnation

    # connections

    def _cut_link(self) -> str:
        prefill = [node.name for node in self.world.nodes() if node.role == "prefill"]
        decode = [node.name for node in self.world.nodes() if node.role == "decode"]
        if not prefill or not decode:
            return ""
        return self._cut(self._rng.choice(prefill), [self._rng.choice(decode)], self._while())

    def _cut_node(self) -> str:
        node = self._node()
        if node is None:
            return ""
        return self._cut(node.name, [peer.name for peer in self.world.nodes() if peer.role != node.role], self._while())

    def _cut(self, one: str, others: list[str], while_s: float) -> str:
        for other in others:
            self.world.wires.cut(one, other)
            self._repair_after(while_s, self.world.wires.heal, one, other)
        return f"{one} and {', '.join(others)}" if others else ""

    def _cut_off(self) -> str:
        process = self._rng.choice((self._node(), self._named("w")))
        if process is None:
            return ""
        self.world.cut_off_from_ledger(process.name)
        self._repair_after(self._while(), self.world.reconnect_to_ledger, process.name)
        return process.name

    # the ledger and the broker

    def _freeze_ledger(self) -> str:
        world, while_s = self.world, self._while()
        if not world.ledger.up or world.ledger.state is not State.RUNNING:
            return ""
        world.ledger.freeze()
        self._repair_after(while_s, world.ledger.thaw)
        if world.one_server:
            world.broker.freeze()
            self._repair_after(while_s, world.broker.thaw)
        return "ledger"

    def _restart_ledger(self) -> str:
        ledger = self.world.ledger
        if not ledger.up or ledger.state is not State.RUNNING:
            return ""
        ledger.crash()
        if self.world.one_server:
            self.world.broker.lose_all()
        self._repair_after(self._rng.uniform(0.05, 3.0), ledger.restart)
        return "ledger"

    def _roll_ledger_back(self) -> str:
        self.world.ledger.fsync()
        self.after(self._rng.choice((0.02, 0.1, 0.3, 1.0)) * self._rng.random(), self._crash_after_fsync)
        return "ledger"

    def _crash_after_fsync(self) -> None:
        if self._active:
            self._restart_ledger()

    def _refuse_writes(self) -> str:
        ledger = self.world.ledger
        if ledger.read_only:
            return ""
        ledger.refuse_writes()
        self._repair_after(self._while(), ledger.take_writes)
        return "ledger"

    def _step_clock(self) -> str:
        self.world.ledger.step_clock(self._rng.choice(_STEPS_MS))
        return "ledger"

    def _stop_clock(self) -> str:
        if not self.world.ledger.clock_runs:
            return ""
        self.world.ledger.stop_clock()
        self._repair_after(self._while(), self.world.ledger.start_clock)
        return "ledger"

    def _restart_broker(self) -> str:
        self.world.broker.lose_all()
        return "broker"
