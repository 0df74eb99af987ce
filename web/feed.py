"""Gap-free output tokens of one request: events wake it, the record decides.

Which tokens come next is the follower's business (``follow.py``); here are its clock and its ledger. On a gap, and
after a second of quiet, the record is read. Where events come from is ``feeds.py``'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from app.errors import LedgerError, LedgerUnknown, ServiceUnavailable
from app.ledger.api import Ledger
from app.protocol.commands import Attach, AttachStatus, Event, ReadStatus, Snapshot, SnapshotAnswer, Watcher
from web.follow import Ask, Follower, Progress

QUIET_S = 1.0
"""Without an event for so long, the record is read: an event may have been lost."""
OUTAGE_S = 10.0
"""With no answer from the ledger for so long, the client is told; a restart takes far less."""


class Feed:
    """Reads one record to its end. For one thread."""

    def __init__(
        self,
        ledger: Ledger,
        uid: str,
        watcher: Watcher,
        record: SnapshotAnswer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``watcher`` watches the request already; ``record`` is what it has seen of it."""
        self._ledger = ledger
        self._uid = uid
        self._watcher = watcher
        self._unread = record
        self._clock = clock
        self._follower = Follower()
        self._watched = True
        """Whether the ledger still knows the watcher, as far as we know."""
        self._heard_at = self._asked_at = clock()
        self._away_since: float | None = None
        self.attach_until_ms = -1
        """Up to this ledger time an ``Attach`` of unknown outcome may still be applied."""

    def look(self) -> Progress | None:
        """Read the record if that is due: there is one unread, the watcher may be lost, or nothing was heard for long.

        Raises:
            Ended: the request failed, expired, was aborted, or its record is not what it was.
            ServiceUnavailable: the ledger has been away too long to know.
        """
        if self._unread is not None:
            record, self._unread = self._unread, None
            return self._take_record(record)
        if not self._watched and self._clock() - self._asked_at >= QUIET_S:
            return self._ask()
        return self._ask() if self._clock() - self._heard_at >= QUIET_S else None

    def hear(self, event: Event) -> Progress | None:
        """Take an event. Raises as ``look``."""
        self._heard_at = self._clock()
        self._away_since = None
        said = self._follower.hear(event)
        return self._ask() if said is Ask.RECORD else said

    def distrust(self) -> None:
        """Something happened to the ledger, or it no longer knew us: watch anew and read the record at once."""
        self._follower.distrust()
        self._watched = False
        self._asked_at = -math.inf

    def _ask(self) -> Progress | None:
        self._heard_at = self._asked_at = self._clock()
        try:
            record = self._read() if self._watched else self._watch()
        except LedgerError:
            record = None
        if record is None:
            self._check_outage()
            return None
        self._away_since = None
        return self._take_record(record)

    def _take_record(self, record: SnapshotAnswer) -> Progress | None:
        said = self._follower.read(record)
        return self._ask() if said is Ask.RECORD else said

    def _read(self) -> SnapshotAnswer:
        return self._ledger.execute(Snapshot(uid=self._uid, from_index=self._follower.read_from))

    def _watch(self) -> SnapshotAnswer | None:
        """The record, watched again: a ledger that lost writes, or took this process for dead, has dropped the watcher.

        None if it will not have it now: this process is not registered yet.
        """
        try:
            answer = self._ledger.execute(Attach(self._uid, self._watcher))
        except LedgerUnknown as error:
            self.attach_until_ms = error.not_after_ms
            raise
        if answer.status is AttachStatus.UNKNOWN:
            return SnapshotAnswer(ReadStatus.UNKNOWN, answer.time_ms)
        self._watched = answer.record is not None
        return answer.record

    def _check_outage(self) -> None:
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since >= OUTAGE_S:
            raise ServiceUnavailable(f"the ledger has not taken or answered a call for {now - self._away_since:.0f} s")
