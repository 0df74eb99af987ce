"""One reader of this process's event stream; each event goes to the mailbox of the answer that waits for it.

One blocking read per process costs a third of one per answer, and a thousand answers share its connection.
An event is only a wake-up: one that is lost or comes twice does no harm (``feed.py``).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from app.errors import LedgerError
from app.ledger.api import Ledger
from app.protocol.commands import Event
from web.logs import log_event

BLOCK_MS = 1000
RETRY_S = 0.2
"""Pause after a failed read: a frozen ledger must not be hammered, and its return should be seen quickly."""

Mail = Event | None
"""``None``: something happened to the ledger, or it no longer knew us; attach anew and trust only the record."""


class Mailboxes:
    """Open answers of this process: by uid, then by connection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: dict[str, dict[str, queue.SimpleQueue[Mail]]] = {}

    def open(self, uids: Sequence[str], connection: str) -> queue.SimpleQueue[Mail]:
        """A mailbox for ``uids``; open it before admission or attachment, so that the first event finds it."""
        box: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        with self._lock:
            for uid in uids:
                self._boxes.setdefault(uid, {})[connection] = box
        return box

    def close(self, uids: Sequence[str], connection: str) -> None:
        with self._lock:
            for uid in uids:
                boxes = self._boxes.get(uid, {})
                boxes.pop(connection, None)
                if not boxes:
                    self._boxes.pop(uid, None)

    def deliver(self, event: Event) -> None:
        """Put ``event`` wherever it is waited for; one for an answer that is gone is dropped."""
        with self._lock:
            boxes = list(self._boxes.get(event.uid, {}).values())
        for box in boxes:
            box.put(event)

    def wake_all(self) -> None:
        """Make every open answer watch its request anew and read its record."""
        with self._lock:
            boxes = {id(box): box for boxes in self._boxes.values() for box in boxes.values()}
        for box in boxes.values():
            box.put(None)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._boxes.values()))


class EventReader(threading.Thread):
    """The thread that reads the stream of ``incarnation`` and fills the mailboxes."""

    def __init__(
        self,
        ledger: Ledger,
        incarnation: str,
        mailboxes: Mailboxes,
        on_crash: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(name="event-reader", daemon=True)
        self._ledger = ledger
        self._incarnation = incarnation
        self._mailboxes = mailboxes
        self._on_crash = on_crash
        self._stopped = threading.Event()
        self._restart = threading.Event()

    def start_over(self) -> None:
        """Read from the start of the stream: it may be another one, whose positions lie before the last seen."""
        self._restart.set()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 - ends the process
            self._on_crash(self.name, error)

    def _read(self) -> None:
        after, away = "0", False
        while not self._stopped.is_set():
            if self._restart.is_set():
                self._restart.clear()
                after = "0"
            try:
                events = self._ledger.read_events(self._incarnation, after, BLOCK_MS)
            except LedgerError as error:
                if not away:
                    log_event(logging.WARNING, "events_away", incarnation=self._incarnation, error=error)
                away = True
                self._stopped.wait(RETRY_S)
                continue
            if away:
                log_event(logging.INFO, "events_back", incarnation=self._incarnation)
                away = False
            for position, event in events:
                self._mailboxes.deliver(event)
                after = position
