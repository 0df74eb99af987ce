"""What befalls processes: crash, restart, freeze, thaw, drain, a part that is stuck; and the ledger's server."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from tests.model.stepping import BEFORE, LASTS, Stepping, fault, step
from tests.sim.node import KVNode
from tests.sim.process import State

_WHICH = st.integers(0, 7)
_NODES = st.sampled_from(("p", "d"))
_OTHERS = st.sampled_from(("w", "c", "b"))
"""First letters of the names: prefill and decode; web, control, beat."""
_STEPS_MS = (400, -400, 3000, -3000, 60_000, -60_000, 7_200_000, -7_200_000)


class ProcessRules(Stepping):
    """Whoever is down or frozen stays so until a rule says otherwise, or the faults are over."""

    @fault(role=_NODES, which=_WHICH, reported=st.booleans(), noticed=st.booleans(), down_s=LASTS)
    def crash(self, role: str, which: int, reported: bool, noticed: bool, down_s: float) -> bool:
        """``reported``: by its supervisor; ``noticed``: by the peers whose connections break."""
        return self._crash(role, which, reported=reported, noticed=noticed, down_s=down_s)

    @fault(role=_OTHERS, which=_WHICH, reported=st.booleans(), down_s=LASTS)
    def web_control_or_beat_crashes(self, role: str, which: int, reported: bool, down_s: float) -> bool:
        return self._crash(role, which, reported=reported, noticed=True, down_s=down_s)

    def _crash(self, role: str, which: int, *, reported: bool, noticed: bool, down_s: float) -> bool:
        name = self._one(State.RUNNING, role, which) or self._one(State.FROZEN, role, which)
        hit = self._work_of(name)
        if not name or not self.mishaps.crash(name, reported=reported, noticed=noticed, down_s=down_s):
            return False
        self._count_hit("crash", hit)
        return True

    @precondition(lambda self: bool(self.cluster.names(State.DEAD)))
    @step(which=_WHICH)
    def restart(self, which: int) -> None:
        names = self.cluster.names(State.DEAD)
        self.mishaps.restart(names[which % len(names)])

    @fault(role=_NODES, which=_WHICH, for_s=LASTS)
    def freeze(self, role: str, which: int, for_s: float) -> bool:
        return self._freeze(role, which, for_s)

    @fault(role=_OTHERS, which=_WHICH, for_s=LASTS)
    def web_control_or_beat_freezes(self, role: str, which: int, for_s: float) -> bool:
        return self._freeze(role, which, for_s)

    def _freeze(self, role: str, which: int, for_s: float) -> bool:
        name = self._one(State.RUNNING, role, which)
        hit = self._work_of(name)
        if not name or not self.mishaps.freeze(name, for_s=for_s):
            return False
        self._count_hit("freeze", hit)
        return True

    @precondition(lambda self: bool(self.cluster.names(State.FROZEN)))
    @step(which=_WHICH)
    def thaw(self, which: int) -> None:
        names = self.cluster.names(State.FROZEN)
        self.mishaps.thaw(names[which % len(names)])

    @fault(role=_NODES, which=_WHICH, reported=st.booleans())
    def drain(self, role: str, which: int, reported: bool) -> bool:
        name = self._one(State.RUNNING, role, which)
        return bool(name) and self.mishaps.drain(name, reported=reported)

    @fault(role=_NODES, which=_WHICH, mover=st.booleans())
    def get_stuck(self, role: str, which: int, mover: bool) -> bool:
        name = self._one(State.RUNNING, role, which)
        return bool(name) and self.mishaps.get_stuck(name, mover=mover)

    # the ledger

    @precondition(lambda self: self.cluster.world.ledger.up)
    @fault()
    def fsync(self) -> None:
        self.mishaps.fsync()

    @precondition(lambda self: self.mishaps.ledger_answers)
    @step(before=BEFORE, loses=st.booleans(), down_s=LASTS)
    def ledger_crashes(self, before: str, loses: bool, down_s: float) -> bool:
        """It goes back to the last fsync; with ``loses`` that was right before the wait for its moment."""
        if loses:
            self.mishaps.fsync()
        self.wait_until(before)
        return self.mishaps.ledger_answers and self.mishaps.crash_ledger(down_s=down_s)

    @precondition(lambda self: self.mishaps.ledger_answers)
    @fault(for_s=LASTS)
    def ledger_freezes(self, for_s: float) -> bool:
        return self.mishaps.freeze_ledger(for_s=for_s)

    @fault(by_ms=st.sampled_from(_STEPS_MS))
    def clock_steps(self, by_ms: int) -> bool:
        return self.mishaps.step_clock(by_ms)

    @precondition(lambda self: self.cluster.world.ledger.clock_runs)
    @fault(for_s=LASTS)
    def clock_stops(self, for_s: float) -> bool:
        return self.mishaps.stop_clock(for_s=for_s)

    def _one(self, state: State, role: str, which: int) -> str:
        """A process in this state, those that hold most first."""
        names = sorted(self.cluster.names(state, role), key=lambda name: len(self._work_of(name)), reverse=True)
        return names[which % len(names)] if names else ""

    def _work_of(self, name: str) -> list[str]:
        """In which phases of a handoff a node is."""
        node = self.cluster.world.current(name) if name else None
        if not isinstance(node, KVNode):
            return []
        return [f"{node.role} {'ending' if one.ending else one.phase}" for one in node.machine.table.values()]

    def _count_hit(self, fault: str, phases: list[str]) -> None:
        for phase in phases:
            self.count(f"{fault} {phase}")
