"""What starts a process again when it has ended, and (in most seeds) reports its end to the ledger at once."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from app.errors import LedgerError
from app.protocol.commands import ReportExit
from tests.sim.ledger_client import LedgerClient, Results
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.world import World

_TRY_AGAIN_S = 0.25
_TRY_FOR_S = 5.0


class Supervisor(Process):
    """``reports``: how many of the exits it sees; of the others the ledger learns by their silence."""

    def __init__(self, world: World, seed: object, reports: float) -> None:
        super().__init__(world, "supervisor")
        self.client = LedgerClient(self)
        self.seen: set[str] = set()
        """Incarnations whose end it has seen."""
        self._reports = reports
        self._rng = Random(f"{seed}/supervisor")

    def ended(self, process: Process) -> None:
        """A process has ended: report it, and start its next life after a while."""
        if self._rng.random() < self._reports:
            self.seen.add(process.incarnation)
            self.after(0.005, self._report, process.incarnation, self.world.timeline.now + _TRY_FOR_S)
        delay_s = self._rng.uniform(0.05, self.world.times.restart_most_s)
        self.after(delay_s, self._start, process.name)

    def _start(self, name: str) -> None:
        self.world.start(name)

    def _report(self, incarnation: str, until: float) -> None:
        self.client.call((ReportExit(incarnation),), partial(self._reported, incarnation, until))

    def _reported(self, incarnation: str, until: float, results: Results) -> None:
        answer = results[0]
        if isinstance(answer, LedgerError):
            if self.world.timeline.now < until:
                self.after(_TRY_AGAIN_S, self._report, incarnation, until)
            return
        for bell in answer.bells:
            self.world.broker.ring(self, bell)
        if answer.more:
            self._report(incarnation, until)
