"""This web process as a node of the ledger: registration, heartbeats, and what must still be said to it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque

from app.errors import LedgerError, ServiceUnavailable
from app.ledger.api import Ledger
from app.protocol.commands import Abort, Detach, Heartbeat, NodeStatus, Register
from app.schemas import Gauges, NodeInfo
from app.settings import Settings
from web.events import EventReader, Mailboxes
from web.logs import log_event


class WebNode:
    """Owns the heartbeat thread and the event reader of one web process.

    A heartbeat is a write: one that was answered lately is the proof that the ledger can be written to.
    """

    def __init__(self, settings: Settings, ledger: Ledger, incarnation: str) -> None:
        self.incarnation = incarnation
        self.mailboxes = Mailboxes()
        self._settings = settings
        self._ledger = ledger
        self._reader = EventReader(ledger, incarnation, self.mailboxes)
        self._heart = threading.Thread(target=self._beat_until_stopped, name="heartbeat", daemon=True)
        self._stopped = threading.Event()
        self._registered = threading.Event()
        self._answered_at = float("-inf")
        self._run_id = ""
        self._away = False
        self._farewells: deque[Abort | Detach] = deque()

    def start(self) -> None:
        """Start both threads. A ledger that is away is waited for, so that web can say so itself."""
        self._heart.start()
        self._reader.start()

    def stop(self) -> None:
        """End both threads; the node stays registered until its exit is reported or its heartbeat is too old."""
        self._stopped.set()
        self._reader.stop()
        self._heart.join()
        self._reader.join()

    def demand_registered(self) -> None:
        """Raises ServiceUnavailable while the ledger does not know this node: it could not watch a request."""
        if not self._registered.is_set():
            raise ServiceUnavailable("this web process is not registered with the ledger yet", retry_after_s=1)

    def wait_registered(self, timeout_s: float) -> bool:
        return self._registered.wait(timeout_s)

    def faults(self) -> list[str]:
        """What is wrong with this process, for ``/health``: a dead thread here would mean silent answers."""
        return [f"thread {t.name} is dead" for t in (self._heart, self._reader) if not t.is_alive()]

    def ledger_faults(self) -> list[str]:
        """Why the ledger cannot be relied on now, for ``/ready``."""
        if not self._registered.is_set():
            return ["this web process is not registered with the ledger"]
        silent_s = time.monotonic() - self._answered_at
        allowed_s = 2 * self._settings.heartbeat_s + self._settings.ledger_timeout_s
        return [f"the ledger has taken no write for {silent_s:.1f} s"] if silent_s > allowed_s else []

    def say_farewell(self, command: Abort | Detach) -> None:
        """Tell the ledger that nobody waits any more; repeated until it answers (both commands are idempotent)."""
        try:
            self._ledger.execute(command)
        except LedgerError as error:
            log_event(logging.WARNING, "farewell_kept", uid=command.uid, command=command.name, error=error)
            self._farewells.append(command)

    def _beat_until_stopped(self) -> None:
        while not self._stopped.is_set():
            try:
                self._beat()
                self._repeat_farewells()
            except LedgerError as error:
                if not self._away:
                    log_event(logging.ERROR, "ledger_away", incarnation=self.incarnation, error=error)
                self._away = True
            else:
                if self._away:
                    log_event(logging.INFO, "ledger_back", incarnation=self.incarnation)
                self._away = False
            self._stopped.wait(self._settings.heartbeat_s)

    def _beat(self) -> None:
        if not self._registered.is_set():
            self._register()
            return
        gauges = Gauges(running=len(self.mailboxes))
        answer = self._ledger.execute(Heartbeat(self.incarnation, gauges))
        if answer.status is NodeStatus.UNKNOWN:
            log_event(logging.ERROR, "node_unknown", incarnation=self.incarnation, open_answers=len(self.mailboxes))
            self._registered.clear()
            self._register()
            return
        self._answered_at = time.monotonic()
        if answer.run_id != self._run_id:
            self._ledger_changed(answer.run_id)

    def _register(self) -> None:
        node = NodeInfo(
            incarnation=self.incarnation,
            role="web",
            name=f"web-{self.incarnation[:8]}",
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        answer = self._ledger.execute(Register(node, round(self._settings.node_ttl_s * 1000)))
        if answer.status is not NodeStatus.OK:
            log_event(logging.ERROR, "register_refused", incarnation=self.incarnation, detail=answer.detail)
            return
        self._answered_at = time.monotonic()
        self._registered.set()
        log_event(logging.INFO, "registered", incarnation=self.incarnation)
        self._ledger_changed(answer.run_id)

    def _ledger_changed(self, run_id: str) -> None:
        """Watchers, events or tokens may be gone: every open answer compares itself with its record."""
        self._run_id = run_id
        self._reader.start_over()
        self.mailboxes.wake_all()

    def _repeat_farewells(self) -> None:
        while self._farewells:
            self._ledger.execute(self._farewells[0])
            self._farewells.popleft()
