"""What a stuck node still says, as ``workers.last_words`` has it: calls take their time, and it acts on meanwhile."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from app.errors import LedgerError
from app.protocol.commands import FailAttempt, ReportExit
from app.schemas import Gauges, Health
from tests.sim.ledger_client import Results
from tests.sim.process import Part
from tests.sim.times import LAST_WORDS_S
from workers.last_words import bells_for, goodbye, hand_back

if TYPE_CHECKING:
    from tests.sim.node import KVNode

_SICK = Gauges(health=Health.UNHEALTHY)


class LastWords(Part):
    """Said once; the process ends when they are, or after LAST_WORDS_S."""

    process: KVNode

    def __init__(self, node: KVNode) -> None:
        self.process = node
        self.begun = False
        self._why = ""
        self._moving: str | None = None

    def say(self, why: str, moving: str | None) -> None:
        """``moving``: the handoff at which the mover is stuck."""
        self.begun, self._why, self._moving = True, why, moving
        self.process.client.call(goodbye(self.process.incarnation, _SICK, moving), self._said_goodbye)
        self.after(LAST_WORDS_S, self._end)

    def _said_goodbye(self, results: Results) -> None:
        fails = hand_back(self.process.incarnation, results[-1], self._why, self._moving)
        if fails:
            self.process.client.call(fails, partial(self._handed_back, fails))
        else:
            self._leave()

    def _handed_back(self, fails: tuple[FailAttempt, ...], results: Results) -> None:
        for bell in bells_for(fails, results):
            self.process.world.broker.ring(self.process, bell)
        self._leave()

    def _leave(self) -> None:
        self.process.client.call((ReportExit(self.process.incarnation),), self._left)

    def _left(self, results: Results) -> None:
        answer = results[0]
        if isinstance(answer, LedgerError):
            self._end()
            return
        for bell in answer.bells:
            self.process.world.broker.ring(self.process, bell)
        if answer.more:
            self._leave()
        else:
            self._end()

    def _end(self) -> None:
        self.process.crash(self._why)
