"""Which tokens of one request come next: pure, from the events and records that it is given.

Events carry the index of their first token, so a repeat is dropped and a gap is seen; on a gap the record is asked for.
Tokens that come again (another attempt, a ledger that lost its last writes) are compared with those already handed out:
an answer is never spliced from two different ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from app.errors import ServiceUnavailable
from app.protocol.commands import Event, ReadStatus, SnapshotAnswer
from app.protocol.tables import TERMINAL, RequestState
from app.schemas import FinishReason
from web.ends import Ended, different_tokens, end_error


@dataclass(frozen=True, slots=True)
class Progress:
    """The next tokens of the answer; with ``finish_reason`` they are the last."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[str, ...] = ()
    """One per token, packed, or none at all."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed, as far as is known."""


class Ask(Enum):
    """What the follower needs to go on."""

    RECORD = "record"
    """A snapshot from ``read_from``."""


@dataclass(slots=True)
class Follower:
    """One answer to its end. Nothing may be given to it after a finish reason or ``Ended``."""

    ids: list[int] = field(default_factory=list)
    """All output tokens handed out so far."""
    read_from: int = 0
    """Index from which to read the record. Tokens before it stand in the ledger as it is now; known ones after it are
    compared when they come again."""
    doubted: bool = False
    """Whether the ledger may ever have lost writes: then the end counts only with the whole record before it."""
    cached_tokens: int = 0
    """Of the prompt; comes with the first token, with the end, and with every record."""

    def distrust(self) -> None:
        """The ledger may have lost writes: compare all that was handed out with what comes from now on."""
        self.read_from = 0
        self.doubted = True

    def hear(self, event: Event) -> Progress | Ask | None:
        """Take an event; any may be lost, doubled, late or out of order.

        Raises:
            Ended: the request failed, expired, was aborted, or other tokens stand at indexes that were handed out.
        """
        if event.state in TERMINAL and event.state != RequestState.FINISHED:
            raise Ended(end_error(event.state, event.error_code, event.error_detail))
        if event.index > self.read_from or self.read_from < len(self.ids):
            return Ask.RECORD  # tokens are missing; or they must come again, and this event may be older than the loss
        if event.state or (event.index == 0 and event.tokens):
            self.cached_tokens = event.cached_tokens
        return self._take(event.index, event.tokens, event.logprobs, event.state, event.finish_reason)

    def read(self, record: SnapshotAnswer) -> Progress | Ask | None:
        """Take the record, read from ``read_from`` or earlier.

        Raises:
            Ended: as ``hear``; or there is no record.
        """
        if record.status is ReadStatus.UNKNOWN:
            raise Ended(ServiceUnavailable("the ledger has lost this request; try again"))
        if record.state in TERMINAL and record.state != RequestState.FINISHED:
            raise Ended(end_error(record.state, record.error_code, record.error_detail))
        self.cached_tokens = record.cached_tokens
        return self._take(record.output_from, record.output_ids, record.logprobs, record.state, record.finish_reason)

    def _take(
        self,
        index: int,
        tokens: tuple[int, ...],
        logprobs: tuple[str, ...],
        state: str,
        finish_reason: FinishReason | None,
    ) -> Progress | Ask | None:
        """Compare what is known already, keep and return what is new. ``index`` <= read_from <= number of ids."""
        known, end = len(self.ids), index + len(tokens)
        finished = state == RequestState.FINISHED
        if list(tokens[: known - index]) != self.ids[index : min(known, end)] or (finished and end < known):
            raise Ended(different_tokens())
        new, new_logprobs = tokens[known - index :], logprobs[known - index :]
        if finished and index > 0 and (self.doubted or not new):  # the last token and the end come together
            self.read_from = 0
            return Ask.RECORD
        self.ids.extend(new)
        self.read_from = max(self.read_from, end)
        if finished:
            return Progress(new, finish_reason or "stop", new_logprobs, self.cached_tokens)
        return Progress(new, None, new_logprobs, self.cached_tokens) if new else None
