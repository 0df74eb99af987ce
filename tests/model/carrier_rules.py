"""What is on its way gets lost, doubled, delayed; calls to the ledger are lost before or after they are applied."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from app.protocol.commands import (
    Abort,
    Activate,
    Admit,
    Attach,
    Claim,
    Detach,
    Emit,
    FailAttempt,
    Heartbeat,
    Holdings,
    Register,
    ReportExit,
    ReserveNext,
    Scan,
    Snapshot,
    Stamp,
)
from tests.model.carriage import SLOW_S
from tests.model.parcels import Parcel, Task
from tests.model.stepping import LASTS, Stepping, fault, step
from tests.sim.faults import Fault
from tests.sim.process import State

_WHICH = st.integers(0, 3)
_PARCELS = st.sampled_from(tuple(Parcel))
USUAL_COMMANDS = tuple(
    command.name for command in (Claim, ReserveNext, Activate, Emit, Stamp, Admit, Holdings, Heartbeat, Scan)
)
"""What is asked in every undisturbed run."""
COMMANDS = USUAL_COMMANDS + tuple(
    command.name for command in (FailAttempt, Abort, Detach, Attach, Snapshot, Register, ReportExit)
)
_COMMANDS = st.sampled_from(COMMANDS)
_BREAKS = st.booleans()
"""Whether the caller sees its connection break; else it waits for its timeout."""


class CarrierRules(Stepping):
    """Each strikes what is on its way, or, if there is nothing of the kind, the next that is sent."""

    @fault(what=_PARCELS, which=_WHICH)
    def lose(self, what: Parcel, which: int) -> bool:
        return self.carriage.lose(what, which)

    @fault(what=_PARCELS, which=_WHICH, again_in_s=st.sampled_from((0.0, 0.01, 0.5, 4.0)))
    def double(self, what: Parcel, which: int, again_in_s: float) -> None:
        self.carriage.double(what, which, again_in_s)

    @fault(what=_PARCELS, which=_WHICH, by_s=st.sampled_from((0.005, SLOW_S, 1.0, 2.2, 4.0)))
    def delay(self, what: Parcel, which: int, by_s: float) -> bool:
        return self.carriage.delay(what, which, by_s)

    @fault(command=_COMMANDS, which=_WHICH, breaks=_BREAKS)
    def ledger_call_is_lost(self, command: str, which: int, breaks: bool) -> bool:
        return self.carriage.lose_call(command, which, breaks=breaks)

    @fault(command=_COMMANDS, which=_WHICH, breaks=_BREAKS)
    def ledger_reply_is_lost(self, command: str, which: int, breaks: bool) -> bool:
        return self.carriage.lose_answer(command, which, breaks=breaks)

    @fault(command=_COMMANDS, which=_WHICH, by_s=st.sampled_from((0.01, SLOW_S, 0.5, 2.5, 6.5)), breaks=_BREAKS)
    def ledger_call_is_applied_late(self, command: str, which: int, by_s: float, breaks: bool) -> bool:
        return self.carriage.delay_call(command, which, by_s, breaks=breaks)

    @step(command=st.sampled_from(USUAL_COMMANDS), which=_WHICH, by_s=st.sampled_from((0.01, SLOW_S, 0.5, 2.5)))
    def ledger_reply_is_late(self, command: str, which: int, by_s: float) -> bool:
        return self.carriage.delay_answer(command, which, by_s)

    @step(task=st.sampled_from((Task.PULL, Task.STEP, Task.SEAL)), by_s=st.sampled_from((0.05, 0.5, 1.2, 3.0)))
    def engine_or_mover_is_slow(self, task: Task, by_s: float) -> bool:
        return self.carriage.slow_down(task, by_s)

    @fault(ticks=st.sampled_from((0, 2)))
    def beat_is_lost_or_doubled(self, ticks: int) -> None:
        self.cluster.strikes(Fault.BEAT_DOUBLED if ticks else Fault.BEAT_LOST)
        self.cluster.faults.tick((0.0, 0.3)[:ticks])

    @fault()
    def broker_forgets_its_bells(self) -> bool:
        return self.mishaps.broker_forgets()

    @fault(number=st.integers(0, 3))
    def kv_block_is_corrupted(self, number: int) -> bool:
        if not self.cluster.strikes(Fault.KV_CORRUPTED):
            return False
        self.cluster.faults.corrupt(number)
        return True

    @fault(which=_WHICH)
    def engine_fails_one_sequence(self, which: int) -> bool:
        names = self.cluster.names(State.RUNNING, "p", "d")
        if not names or not self.cluster.strikes(Fault.SEQUENCE_BROKEN):
            return False
        self.cluster.faults.break_sequence(names[which % len(names)])
        return True

    # links

    @fault(prefill=_WHICH, decode=_WHICH, keeps=st.booleans(), for_s=LASTS)
    def link_is_cut(self, prefill: int, decode: int, keeps: bool, for_s: float) -> bool:
        one, other = f"p{prefill % self.PREFILL_NODES}", f"d{decode % self.DECODE_NODES}"
        return self.mishaps.cut(one, other, keeps=keeps, for_s=for_s)

    @fault(which=_WHICH, keeps=st.booleans(), for_s=LASTS)
    def process_is_cut_off_from_the_ledger(self, which: int, keeps: bool, for_s: float) -> bool:
        names = [*self.cluster.world.scenario.nodes, "w0"]
        return self.mishaps.cut_off_from_ledger(names[which % len(names)], keeps=keeps, for_s=for_s)

    @precondition(lambda self: bool(self.mishaps.mender))
    @step(which=st.integers(0, 7))
    def mend(self, which: int) -> None:
        """Whatever lasts: a cut, a process that is down or frozen, a ledger that is away."""
        self.mishaps.mender.mend(which)
