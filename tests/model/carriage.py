"""Faults of what is on its way: parcels between processes, calls to the ledger and their answers, jobs in a node.

Each strikes what is on its way under the given name, or, where nothing is, the next that is sent. Each answers whether
it did: not where the mood of the cluster forbids it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model.chosen import KEEP_ALIVE, LATE_CALL, LATE_REPLY, LOST_CALL, LOST_REPLY
from tests.model.parcels import BELLS, Parcel, Task, answer, call, pending
from tests.sim.disasters import Disaster
from tests.sim.fates import CallFate
from tests.sim.faults import Fault

if TYPE_CHECKING:
    from tests.model.cluster import Cluster
    from tests.sim.timeline import Happening

SLOW_S = 0.05
"""What is late by no more than this is slow, and that costs nobody an attempt."""


class Carriage:
    """``which``: of several of the same name."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._faults = cluster.faults

    # parcels

    def lose(self, name: str, which: int) -> bool:
        """This parcel never comes."""
        if not self._cluster.strikes(_kind(name, Fault.BELL_LOST, Fault.EVENT_LOST, Fault.MESSAGE_LOST)):
            return False
        what = self._take(name, which)
        if what is None:
            self._faults.carry(name, ())
        else:
            self._struck("lost", name, what)
        return True

    def double(self, name: str, which: int, again_in_s: float) -> None:
        """It comes twice."""
        self._cluster.strikes(_kind(name, Fault.BELL_DOUBLED, Fault.EVENT_DOUBLED, Fault.MESSAGE_DOUBLED))
        there = pending(self._world, name)
        if not there:
            self._faults.carry(name, (0.0, again_in_s))
            return
        when, _, what = there[which % len(there)]
        self._world.timeline.at(when + again_in_s, what)
        self._struck("doubled", name, what)

    def delay(self, name: str, which: int, by_s: float) -> bool:
        """It comes late, after what was sent behind it."""
        kind = _kind(name, Fault.BELL_LATE, Fault.EVENT_LATE, Fault.MESSAGE_LATE)
        if by_s > SLOW_S and not self._cluster.strikes(kind):
            return False
        what = self._take(name, which)
        if what is None:
            self._faults.carry(name, (by_s,))
        else:
            self._again("late", name, what, by_s)
        return True

    # calls

    def lose_call(self, command: str, which: int, *, breaks: bool) -> bool:
        """A ledger call never arrives; its caller sees the connection break, or waits for its timeout."""
        if not self._strikes_call(command, Fault.LEDGER_CALL_LOST):
            return False
        what = self._take(call(command), which)
        if what is None:
            self._faults.call(command, CallFate(None, None, 0.0 if breaks else None))
        else:
            self._struck(LOST_CALL, command, what)
            self._call_disturbed(what, 0.0, breaks=breaks)
        return True

    def delay_call(self, command: str, which: int, by_s: float, *, breaks: bool) -> bool:
        """A ledger call is applied late, maybe after its caller gave up, maybe after its ``not_after``."""
        if (breaks or by_s > SLOW_S) and not self._strikes_call(command, Fault.LEDGER_CALL_LATE):
            return False
        what = self._take(call(command), which)
        if what is None:
            self._faults.call(command, CallFate(by_s, None, 0.0 if breaks else None))
        else:
            self._again(LATE_CALL, command, what, by_s)
            self._call_disturbed(what, by_s, breaks=breaks)
        return True

    def lose_answer(self, command: str, which: int, *, breaks: bool) -> bool:
        """A ledger call is applied, and its caller never hears of it."""
        if not self._strikes_call(command, Fault.LEDGER_REPLY_LOST):
            return False
        what = self._take(answer(command), which)
        if what is None:
            self._faults.call(command, CallFate(0.0, 0, 0.01 if breaks else None))
            return True
        self._struck(LOST_REPLY, command, what)
        caller = what.func.__self__  # type: ignore[attr-defined]
        if breaks and caller.process.alive:  # a dead process hears of nothing
            caller._broken(what.args[0])
        return True

    def delay_answer(self, command: str, which: int, by_s: float) -> bool:
        """The answer, if one comes up, is slow, maybe so slow that the caller gives up."""
        if by_s > SLOW_S and not self._strikes_call(command, Fault.LEDGER_REPLY_LOST):
            return False
        self._cluster.come_up(answer(command))
        what = self._take(answer(command), which)
        if what is None:
            return False
        self._again(LATE_REPLY, command, what, by_s)
        return True

    # jobs

    def slow_down(self, task: Task, by_s: float) -> bool:
        """A step of the engine or a job of the mover takes longer, not so long that the watchdog would see it."""
        if by_s > SLOW_S and not self._cluster.strikes(Disaster.ENGINE_STUCK):
            return False
        self._cluster.come_up(task)
        what = self._take(task, 0)
        if what is None:
            return False
        self._again("slow", task, what, by_s)
        return True

    # how

    def _take(self, name: str, which: int) -> Happening | None:
        there = pending(self._world, name)
        return self._cluster.take(there, which) if there else None

    def _again(self, how: str, name: str, what: Happening, in_s: float) -> None:
        self._world.timeline.at(self._cluster.now + in_s, what)
        self._struck(how, name, what)

    def _call_disturbed(self, what: Happening, late_s: float, *, breaks: bool) -> None:
        client, number, commands = what.args[:3]
        self._faults.call_disturbed(commands, late_s)
        if breaks:
            client._broken(number)

    def _strikes_call(self, command: str, kind: Fault) -> bool:
        """Signs of life that do not come through make a node look dead."""
        return self._cluster.strikes(Disaster.NODE_FREEZES if command in KEEP_ALIVE else kind)

    def _struck(self, how: str, name: str, what: Happening) -> None:
        self._faults.struck(how, name, "", *what.args)


def _kind(name: str, bell: Fault, event: Fault, message: Fault) -> Fault:
    if name in BELLS:
        return bell
    return event if name == Parcel.EVENT else message
