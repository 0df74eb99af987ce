"""Control workers, which scan when beat rings, and beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.errors import LedgerError
from app.protocol.commands import Scan
from app.schemas import NodeInfo
from tests.sim.heartbeat import Beats
from tests.sim.ledger_client import LedgerClient, Results
from tests.sim.process import Process, State

if TYPE_CHECKING:
    from tests.sim.world import World

_MOST_ROUNDS = 16


class Control(Process):
    """One life of a control worker. Acts as ``workers.control`` does."""

    def __init__(self, world: World, name: str, life: int) -> None:
        super().__init__(world, name, life)
        self.client = LedgerClient(self)
        info = NodeInfo(incarnation=self.incarnation, role="control", name=name, pid=1, host="host")
        self.beats = Beats(self, self, info, self.client)
        self._rounds = 0

    def scan(self) -> None:
        """Beat rang."""
        self._rounds = _MOST_ROUNDS
        self._scan(round(500 * self.world.times.scan_s))

    def _scan(self, min_age_ms: int) -> None:
        self._rounds -= 1
        self.client.call((Scan(min_age_ms=min_age_ms),), self._scanned)

    def _scanned(self, results: Results) -> None:
        answer = results[0]
        if isinstance(answer, LedgerError):
            return
        for bell in answer.bells:
            self.world.broker.ring(self, bell)
        if answer.ran and answer.more and self._rounds > 0:
            self._scan(0)

    @property
    def at_rest(self) -> bool:
        return self.beats.registered

    def on_beat(self) -> None:
        """Nothing here can be stuck."""

    def on_registered(self) -> None:
        """Nothing to do."""

    def on_registration_lost(self) -> None:
        self.beats.register()

    def on_refused(self) -> None:
        """It goes on trying."""

    def on_draining(self) -> None:
        """It holds nothing."""

    def on_ledger_restarted(self) -> None:
        """It holds nothing."""

    def after_beat(self) -> None:
        """Nothing to do."""


class Beat(Process):
    """Celery beat: a tick every ``scan_s``, for whichever control worker there is."""

    def start(self) -> None:
        self.after(self.world.times.scan_s, self._tick)

    def _tick(self) -> None:
        for delay in self.world.faults.beat():
            self.after(delay, self._ring)
        self.after(self.world.times.scan_s, self._tick)

    def _ring(self) -> None:
        workers = [one for one in self.world.running() if isinstance(one, Control) and one.alive]
        if workers and self.world.broker.state is State.RUNNING:
            worker = workers[self.world.pace.choose(len(workers))]
            worker.after(self.world.pace.network(), worker.scan)
