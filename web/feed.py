"""Gap-free output tokens of one request: events wake it, the record decides.

Events carry the index of their first token, so a repeat is dropped and a gap is seen. On a gap, and after a second of
quiet, the record is read instead. Tokens that come again (another attempt, a ledger that lost its last writes) are
compared with those already handed out: an answer is never spliced from two different ones.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import ApiError, LedgerError, RequestAborted, RequestExpired, RequestFailed, ServiceUnavailable
from app.ledger.api import Ledger
from app.protocol.commands import Event, ReadStatus, Snapshot
from app.protocol.tables import TERMINAL, FailureReason, RequestState
from app.schemas import FinishReason
from web.events import Mail

QUIET_S = 1.0
"""Without an event for so long, the record is read: an event may have been lost."""
OUTAGE_S = 10.0
"""With no answer from the ledger for so long, the client is told; a restart takes far less."""


class Ended(Exception):
    """The request ended without success. ``error`` is what the client is told."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Progress:
    """The next tokens of the answer; with ``finish_reason`` they are the last."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None


class Feed:
    """Reads one request to its end. For one thread."""

    def __init__(
        self,
        ledger: Ledger,
        uid: str,
        mailbox: queue.SimpleQueue[Mail],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._uid = uid
        self._mailbox = mailbox
        self._clock = clock
        self._ids: list[int] = []
        self._verified = 0
        """Tokens before this index stand in the ledger as it is now; the rest is compared when it comes again."""
        self._heard_at = clock()
        self._away_since: float | None = None

    def next(self, timeout_s: float) -> Progress | None:
        """The next progress, or None if there is none within ``timeout_s``.

        Raises:
            Ended: the request failed, expired, was aborted, or its record is not what it was.
            ServiceUnavailable: the ledger has been away too long to know.
        """
        try:
            mail = self._mailbox.get(timeout=timeout_s)
        except queue.Empty:
            return self._read_record() if self._clock() - self._heard_at >= QUIET_S else None
        if mail is None:
            self._verified = 0
            return self._read_record()
        self._heard_at = self._clock()
        self._away_since = None
        return self._take_event(mail)

    def _take_event(self, event: Event) -> Progress | None:
        if event.state in TERMINAL and event.state != RequestState.FINISHED:
            raise Ended(end_error(event.state, event.error_code, event.error_detail))
        if event.index > self._verified:
            return self._read_record()
        return self._take(event.index, event.tokens, event.state, event.finish_reason)

    def _read_record(self) -> Progress | None:
        self._heard_at = self._clock()
        try:
            record = self._ledger.execute(Snapshot(uid=self._uid, from_index=self._verified))
        except LedgerError:
            self._check_outage()
            return None
        self._away_since = None
        if record.status is ReadStatus.UNKNOWN:
            raise Ended(ServiceUnavailable("the ledger has lost this request; try again"))
        if record.state in TERMINAL and record.state != RequestState.FINISHED:
            raise Ended(end_error(record.state, record.error_code, record.error_detail))
        return self._take(self._verified, record.output_ids, record.state, record.finish_reason)

    def _take(
        self, index: int, tokens: tuple[int, ...], state: str, finish_reason: FinishReason | None
    ) -> Progress | None:
        """Compare what is known already, keep and return what is new. ``index`` <= verified <= number of ids."""
        known, end = len(self._ids), index + len(tokens)
        if list(tokens[: known - index]) != self._ids[index : min(known, end)]:
            raise Ended(_different())
        new = tokens[known - index :]
        self._ids.extend(new)
        self._verified = max(self._verified, end)
        if state == RequestState.FINISHED:
            if self._verified < known:
                raise Ended(_different())
            return Progress(new, finish_reason or "stop")
        return Progress(new) if new else None

    def _check_outage(self) -> None:
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since >= OUTAGE_S:
            raise ServiceUnavailable(f"the ledger has not answered for {now - self._away_since:.0f} s")


def end_error(state: str, code: str, detail: str) -> ApiError:
    """The error of a request that ended as ``state``; ``code``: a FailureReason, a timeout, an abort's reason."""
    why = f"{code}: {detail}" if detail else code or "no reason given"
    if state == RequestState.EXPIRED:
        return RequestExpired(f"the request expired ({why})", retry_after_s=1)
    if state == RequestState.ABORTED:
        return RequestAborted(f"the request was aborted ({why})")
    return RequestFailed(f"the request failed ({why})")


def _different() -> ApiError:
    why = f"{FailureReason.DIFFERENT_TOKENS}: the ledger now holds another answer than was sent so far"
    return RequestFailed(f"the request failed ({why})")
