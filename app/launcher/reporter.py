"""Tells the ledger at once which incarnation has ended, so that its requests need not wait for its heartbeat to age."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from app.errors import LedgerError
from app.launcher.wakeup import Deadline
from app.protocol.commands import Bell, ReportExit, ScanAnswer

log = logging.getLogger(__name__)

_RETRY_S = 0.25


class ExitLedger(Protocol):
    """The part of a ledger that is needed here."""

    def execute(self, command: ReportExit, /) -> ScanAnswer: ...
    def close(self) -> None: ...


class ExitReporter:
    """Reports from a thread of its own: a ledger that does not answer must not hold up a restart.

    Args:
        connect: makes a ledger connection; called in the thread.
        ring: rings a bell for what the report put back into the queue; does not wait for the broker.
        try_for_s: how long one report is tried. Later the node's silence says the same.
    """

    def __init__(
        self, connect: Callable[[], ExitLedger], ring: Callable[[Bell], None], *, try_for_s: float = 5.0
    ) -> None:
        self._connect = connect
        self._ring = ring
        self._try_for_s = try_for_s
        self._ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exit-reporter", daemon=True)
        self._thread.start()

    def report(self, incarnation: str) -> None:
        """Have it reported. Returns at once."""
        self._ended.put(incarnation)

    def close(self, within_s: float) -> None:
        """Finish what is queued, within this time."""
        self._closing.set()
        self._ended.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        ledger: ExitLedger | None = None
        while (incarnation := self._ended.get()) is not None:
            deadline = Deadline(self._try_for_s)
            while True:
                try:
                    ledger = ledger or self._connect()
                    self._report(ledger, incarnation)
                except LedgerError as error:
                    if deadline.passed or self._closing.wait(min(_RETRY_S, deadline.left_s)):
                        log.warning("exit of %s not reported: %s", incarnation, error)
                        break
                except Exception:  # whatever it is, the next exit is reported all the same
                    log.exception("exit of %s not reported", incarnation)
                    break
                else:
                    break
        if ledger is not None:
            ledger.close()

    def _report(self, ledger: ExitLedger, incarnation: str) -> None:
        """Report one exit; repeating it is harmless, so an unknown outcome is simply tried again."""
        more = True
        while more:
            answer = ledger.execute(ReportExit(incarnation))
            for bell in answer.bells:
                self._ring(bell)
            more = answer.more
