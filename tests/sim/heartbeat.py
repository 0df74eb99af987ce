"""A process's sign of life: registration, heartbeats, a scan if nobody else scans. Acts as ``app.heartbeat`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from app.errors import LedgerError
from app.protocol.commands import Heartbeat, NodeAnswer, NodeStatus, Register, Scan
from app.schemas import Gauges, NodeInfo
from tests.sim.ledger_client import LedgerClient, Results
from tests.sim.process import Part
from tests.sim.times import SCAN_OVERDUE_S

if TYPE_CHECKING:
    from tests.sim.process import Process

_GAUGES = Gauges()


class Registered(Protocol):
    """What a process is told by its heartbeats."""

    def on_beat(self) -> None:
        """Before each one: look for parts that are stuck."""

    def on_registered(self) -> None: ...
    def on_registration_lost(self) -> None: ...
    def on_refused(self) -> None: ...
    def on_draining(self) -> None:
        """Somebody asked the ledger to drain it. Said once."""

    def on_ledger_restarted(self) -> None: ...
    def after_beat(self) -> None:
        """The ledger has answered."""


class Beats(Part):
    """One beat after the other; each waits for its answers, or for their timeouts."""

    def __init__(self, process: Process, hears: Registered, info: NodeInfo, client: LedgerClient) -> None:
        self.process = process
        self.registered = False
        self._hears = hears
        self._info = info
        self._client = client
        self._wants_registration = True
        self._run_id = ""
        self._scan_at = 0.0
        self._closed = False
        self._told_to_drain = False

    def start(self) -> None:
        """The first beat follows at once."""
        self.after(self.process.world.pace.thread(), self._beat)

    def register(self) -> None:
        """Register (again) with the next beat."""
        self._wants_registration = True

    def close(self) -> None:
        """No more beats; the entry stays until it is taken away or too old."""
        self._closed = True

    def _beat(self) -> None:
        if self._closed:
            return
        self._hears.on_beat()
        if not self.process.alive:
            return
        if self.registered:
            self._client.call((Heartbeat(self._info.incarnation, _GAUGES),), self._alive)
        else:
            self._register_if_wanted()

    def _again(self) -> None:
        self.after(self.process.world.times.heartbeat_s, self._beat)

    def _alive(self, results: Results) -> None:
        answer = results[0]
        if isinstance(answer, LedgerError):
            self._again()
            return
        if answer.status is NodeStatus.UNKNOWN:
            self.registered = False
            self._hears.on_registration_lost()
        else:
            self._heard(answer)
        self._register_if_wanted()

    def _heard(self, answer: NodeAnswer) -> None:
        if answer.status is NodeStatus.DRAINING and not self._told_to_drain:
            self._told_to_drain = True
            self._hears.on_draining()
        if answer.run_id != self._run_id:
            self._run_id = answer.run_id
            self._hears.on_ledger_restarted()

    def _register_if_wanted(self) -> None:
        if self._wants_registration and not self._closed:
            ttl_ms = round(1000 * self.process.world.times.node_ttl_s)
            self._client.call((Register(self._info, ttl_ms),), self._register_answered)
        else:
            self._scan_if_due()

    def _register_answered(self, results: Results) -> None:
        answer = results[0]
        if isinstance(answer, LedgerError):
            self._again()
            return
        if answer.status is NodeStatus.OK:
            self._wants_registration = False
            self.registered = True
            self._run_id = answer.run_id
            self._hears.on_registered()
        else:
            self._hears.on_refused()
        self._scan_if_due()

    def _scan_if_due(self) -> None:
        now = self.process.world.timeline.now
        if self.registered and now >= self._scan_at:
            self._scan_at = now + SCAN_OVERDUE_S / 2
            self._client.call((Scan(min_age_ms=round(1000 * SCAN_OVERDUE_S)),), self._scanned)
        else:
            self._done()

    def _scanned(self, results: Results) -> None:
        answer = results[0]
        if isinstance(answer, LedgerError):
            self._again()
            return
        for bell in answer.bells:
            self.process.world.broker.ring(self.process, bell)
        self._done()

    def _done(self) -> None:
        self._hears.after_beat()
        self._again()
