"""A process's way to the ledger: calls with ``not_after`` and a timeout, whose outcome may stay unknown (rule 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from app.errors import LedgerError, LedgerUnavailable, LedgerUnknown
from app.protocol.commands import Answer, Attach, Command, Snapshot
from tests.sim.ledger_server import READS
from tests.sim.process import Part, Process, State
from tests.sim.times import CALL_TTL_S

_STALE_AFTER_S = 1.0
_NOBODYS = -1
"""Number of a call whose answer nobody waits for any more."""
Results = list[Any]
"""An answer or a LedgerError for each command."""
Then = Callable[[Results], None]


class LedgerClient(Part):
    """The connections of one process. Each call takes one of its own: calls never wait for each other."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._number = 0
        self._open: dict[int, tuple[tuple[Command, ...], Then, int]] = {}
        self._seen_ms = 0
        self._seen_at = float("-inf")

    def call(self, commands: tuple[Command, ...], then: Then) -> None:
        """Send ``commands`` in one round trip; ``then`` gets one result for each, no later than the timeout."""
        process, world = self.process, self.process.world
        server, faults = world.ledger, world.faults
        self._number += 1
        number = self._number
        if not self._reachable():
            self._open[number] = (commands, then, -1)
            self.after(world.pace.network(), self._broken, number)
            return
        if world.timeline.now - self._seen_at > _STALE_AFTER_S:
            if server.state is State.FROZEN:  # it cannot even be asked for its time
                self._open[number] = (commands, then, -1)
                self.after(world.times.ledger_timeout_s, self._broken, number)
                return
            self._saw(server.time_ms())
        not_after_ms = self._seen_ms + round(1000 * CALL_TTL_S)
        self._open[number] = (commands, then, not_after_ms)
        fate = faults.ledger_call(process.name, commands)
        arrives = partial(server.arrives, self, number, commands, not_after_ms, server.life, fate)
        if world.cut_off(process.name):
            if faults.coin():
                world.hold_call(process.name, arrives)
        elif fate.arrives_s is not None:
            world.timeline.at(world.timeline.now + world.pace.network() + fate.arrives_s, arrives)
        breaks_s = world.times.ledger_timeout_s if fate.breaks_s is None else fate.breaks_s
        self.after(breaks_s, self._broken, number)

    def answered(self, number: int, answers: list[Answer], time_ms: int) -> None:
        """Answers of one call; those after the last that came through are unknown."""
        entry = self._open.pop(number, None)
        if entry is None:
            return
        self._saw(time_ms)
        commands, then, not_after_ms = entry
        missing = [_unknown(command, not_after_ms) for command in commands[len(answers) :]]
        then([*answers, *missing])

    def ask_now(self, command: Snapshot | Attach) -> Any:
        """Ask and wait for the answer, for callers that block. Raises LedgerUnavailable or LedgerUnknown."""
        process, world = self.process, self.process.world
        server = world.ledger
        if server.state is not State.RUNNING or not self._reachable() or world.cut_off(process.name):
            raise LedgerUnavailable("no answer")
        fate = world.faults.ledger_call(process.name, (command,))
        not_after_ms = server.time_ms() + round(1000 * CALL_TTL_S)
        if fate.arrives_s == 0.0:
            answer = server.answer(process.name, command, not_after_ms)
            if isinstance(answer, LedgerError):
                raise answer
            if fate.answered is None:
                return answer
        elif fate.arrives_s is not None:
            arrives = partial(server.arrives, self, _NOBODYS, (command,), not_after_ms, server.life, fate)
            world.timeline.at(world.timeline.now + fate.arrives_s, arrives)
        raise _unknown(command, not_after_ms)

    def _reachable(self) -> bool:
        return self.process.world.ledger.up

    def _saw(self, time_ms: int) -> None:
        self._seen_ms, self._seen_at = time_ms, self.process.world.timeline.now

    def _broken(self, number: int) -> None:
        entry = self._open.pop(number, None)
        if entry is not None:
            commands, then, not_after_ms = entry
            then([_unknown(command, not_after_ms) for command in commands])


def _unknown(command: Command, not_after_ms: int) -> LedgerError:
    if not_after_ms < 0 or isinstance(command, READS):
        return LedgerUnavailable("nothing was sent, or only a read")
    return LedgerUnknown("no answer in time", not_after_ms=not_after_ms)
