"""Time passes, and each step of a handoff happens when a rule says so: out of its turn, or with all before it."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from app.protocol.commands import Activate, Claim, Emit, Holdings, ReserveNext, Stamp
from tests.model.parcels import Parcel, Task, answer, call
from tests.model.stepping import Stepping, step
from tests.sim.process import State

_WHICH = st.integers(0, 3)
_STOP_BEFORE = st.booleans()
_CALLS = (Claim, Stamp, ReserveNext, Activate, Emit, Holdings)


class HandoffRules(Stepping):
    """``which`` of those that are on their way; with ``stop_before`` it only comes up, and the next rule meets it."""

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def claim(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(call(Claim.name), which, stop_before=stop_before)

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def reserve(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(call(ReserveNext.name), which, stop_before=stop_before)

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def grant(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(Parcel.GRANT, which, stop_before=stop_before)

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def compute(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(Task.STEP, which, stop_before=stop_before)

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def seal(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(Task.SEAL, which, stop_before=stop_before)

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def commit(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(Parcel.COMMIT, which, stop_before=stop_before)

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def pull(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(Task.PULL, which, stop_before=stop_before)

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def activate(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(call(Activate.name), which, stop_before=stop_before)

    @step(which=_WHICH, stop_before=_STOP_BEFORE)
    def emit(self, which: int, stop_before: bool) -> bool:
        return self.cluster.let(call(Emit.name), which, stop_before=stop_before)

    @step(
        what=st.sampled_from((*Parcel, *(answer(command.name) for command in _CALLS))),
        which=_WHICH,
        stop_before=_STOP_BEFORE,
    )
    def overtake(self, what: str, which: int, stop_before: bool) -> bool:
        return self.cluster.let(what, which, stop_before=stop_before)

    @step(which=_WHICH, count=st.integers(1, 8))
    def one_process_is_quick(self, which: int, count: int) -> bool:
        names = self.cluster.names(State.RUNNING, "p", "d", "w")
        return bool(names) and self.cluster.let_process(names[which % len(names)], count)

    # time

    @step(count=st.integers(1, 5))
    def next_happenings(self, count: int) -> None:
        self.cluster.next_happenings(count)

    @step(seconds=st.sampled_from((0.001, 0.004, 0.02, 0.1)))
    def a_moment_passes(self, seconds: float) -> None:
        self.cluster.run_for(seconds)

    @step(seconds=st.sampled_from((0.3, 0.7, 1.1, 2.3, 6.0)))
    def a_while_passes(self, seconds: float) -> None:
        self.cluster.run_for(seconds)

    @step(which=st.integers(0, 2))
    def next_deadline_passes(self, which: int) -> bool:
        return self.cluster.next_deadline(which)

    @precondition(lambda self: bool(self.cluster.in_process()))
    @step()
    def expire(self) -> bool:
        return self.cluster.expire()
