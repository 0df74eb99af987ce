"""Control's task, rung by beat: the scan that expires leases, recovers orphans and rings again."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial

from celery import shared_task

from app.bells import BellLane, Bells
from app.crash import end_crashed, end_refused
from app.errors import LedgerError
from app.heartbeat import HeartbeatThread
from app.ids import draw_id
from app.ledger import Ledger
from app.ledger.redis import connect
from app.protocol.commands import Deregister, Scan
from app.schemas import Gauges, NodeInfo
from app.settings import Settings

MOST_ROUNDS = 16
"""Scripts per scan, each with bounded work: a mass expiry is dealt with at once, and still not without end."""
_hosts: list[ControlHost] = []
"""This process's host while it takes tasks: one, or none."""


@shared_task(name="control.scan")
def scan() -> str:
    """Release expired preallocations, recover orphans, ring again; rings the bells that the ledger asks for.

    Two at once, or none for a while, are harmless: the script is idempotent, and every node scans when nobody does.
    """
    return _hosts[0].scan() if _hosts else "this worker is no control worker, or is stopping"


class ControlHost:
    """A control worker: a node without KV. Its heartbeats say that somebody scans."""

    wants_bells = True

    def __init__(self, settings: Settings, nodename: str, ledger: Ledger, bells: BellLane) -> None:
        self._ledger = ledger
        self._bells = bells
        self._scan_min_age_ms = round(500 * settings.scan_s)
        self._node = NodeInfo(
            incarnation=settings.incarnation or draw_id(),
            role="control",
            name=nodename,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        self._heartbeat = HeartbeatThread(
            settings,
            ledger,
            self._node,
            Gauges,
            ring=bells.ring,
            on_crash=partial(end_crashed, nodename),
            on_refused=partial(end_refused, nodename),
        )

    def start(self) -> None:
        """Start the heartbeats; from now on scans run here."""
        self._bells.start()
        self._heartbeat.start()
        _hosts.append(self)

    def scan(self) -> str:
        """Scan, and ring for what was found; answers what that was."""
        found: Counter[str] = Counter()
        min_age_ms = self._scan_min_age_ms
        for _ in range(MOST_ROUNDS):
            try:
                answer = self._ledger.execute(Scan(min_age_ms=min_age_ms))
            except LedgerError as error:
                return f"no answer: {error}"
            for bell in answer.bells:
                self._bells.ring(bell)
            if not answer.ran:
                return "not due"
            found += Counter(bells=len(answer.bells), expired=len(answer.expired), recovered=len(answer.recovered))
            if not answer.more:
                break
            min_age_ms = 0  # what is due is due now, however much of it there is
        return " ".join(f"{name}={found[name]}" for name in ("bells", "expired", "recovered"))

    def ring(self, uid: str, attempt: int, done: Callable[[str], None]) -> None:
        """A bell on the control queue has no meaning."""
        done("control workers take no bells")

    def drain(self, timeout_s: float) -> bool:
        """Leave the registry; scans in flight take milliseconds."""
        self._heartbeat.close()
        try:
            self._ledger.execute(Deregister(self._node.incarnation))
        except LedgerError:
            return False
        return True

    def hand_back(self) -> None:
        """It holds nothing."""

    def close(self) -> None:
        """Give the connections back."""
        if self in _hosts:
            _hosts.remove(self)
        self._heartbeat.close()
        self._bells.close()
        self._ledger.close()


def make_host(settings: Settings, nodename: str) -> ControlHost:
    """The host of a control worker."""
    bells = BellLane(Bells(settings), partial(end_crashed, nodename))
    return ControlHost(settings, nodename, connect(settings), bells)
