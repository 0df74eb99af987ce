"""Gap-free output tokens of all sequences of one request, from one mailbox."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence

from app.ledger.api import Ledger
from app.protocol.commands import SnapshotAnswer, Watcher
from web.events import Mail
from web.feed import Feed
from web.follow import Progress

SWEEP_S = 0.5
"""Pause between looks at those that are not heard of, while others are."""


class Feeds:
    """Reads the sequences of one request to their ends. For one thread."""

    def __init__(
        self,
        ledger: Ledger,
        uids: Sequence[str],
        watcher: Watcher,
        mailbox: queue.SimpleQueue[Mail],
        records: Sequence[SnapshotAnswer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``watcher`` watches all of ``uids`` already; ``records`` are what it has seen of them, or none."""
        self._mailbox = mailbox
        self._clock = clock
        self._feeds = [
            Feed(ledger, uid, watcher, records[index] if records else None, clock) for index, uid in enumerate(uids)
        ]
        self._open = dict(zip(uids, range(len(uids)), strict=True))
        """Index of each that has not come to its end."""
        self._due: deque[int] = deque(range(len(uids)) if records else ())
        self._swept_at = clock()

    def next(self, timeout_s: float) -> tuple[int, Progress] | None:
        """Index of a sequence and its next progress, or None if there is none within ``timeout_s``.

        Raises:
            Ended: one of them failed, expired, was aborted, or its record is not what it was.
            ServiceUnavailable: the ledger has been away too long to know.
        """
        if not self._due and self._clock() - self._swept_at >= SWEEP_S:
            self._sweep()
        found = self._look_at_due()
        if found is not None:
            return found
        try:
            mail = self._mailbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if mail is None:
            for index in self._open.values():
                self._feeds[index].distrust()
            self._due = deque(self._open.values())
            return self._look_at_due()
        if mail.uid not in self._open:
            return None  # of one that has ended, as its record said
        index = self._open[mail.uid]
        progress = self._feeds[index].hear(mail)
        return None if progress is None else self._took(index, progress)

    @property
    def attach_until_ms(self) -> int:
        """Up to this ledger time an ``Attach`` of unknown outcome may still be applied."""
        return max(feed.attach_until_ms for feed in self._feeds)

    def _look_at_due(self) -> tuple[int, Progress] | None:
        while self._due:
            index = self._due.popleft()
            progress = self._feeds[index].look()
            if progress is not None:
                return self._took(index, progress)
        return None

    def _sweep(self) -> None:
        self._swept_at = self._clock()
        self._due = deque(self._open.values())

    def _took(self, index: int, progress: Progress) -> tuple[int, Progress]:
        if progress.finish_reason is not None:
            self._open = {uid: other for uid, other in self._open.items() if other != index}
            self._due = deque(other for other in self._due if other != index)
        return index, progress
