"""What web asks of the ledger: admit, abort, detach, attach, snapshot; and the events that come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from app.schemas import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Watcher:
    """A client connection that wants a request's events."""

    web: str
    """Incarnation of the web process."""
    connection: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may cost and how long it may take; fixed at admission, kept in its record."""

    max_attempts: int
    max_queued: int
    queue_timeout_ms: int
    first_token_timeout_ms: int
    record_ttl_ms: int
    grace_ms: int = 0
    """How long a request that nobody watches any more goes on before it is aborted."""
    dedup_window_ms: int = 0
    """How long a FINISHED request's client id is still refused as a duplicate."""


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """What a client names a request by, so that sending it again finds the first one."""

    scoped: str
    """The client's key, made unique to its API key and hashed."""
    body: str
    """Hash of what was asked for: another body under the same key is refused."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """A further sequence of one request. All that is not named here it shares with the first one."""

    uid: str
    """``choice_uid`` of the first one's."""
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


class AdmitStatus(StrEnum):
    ADMITTED = "ADMITTED"
    KNOWN = "KNOWN"  # the idempotency key has a request already: attach to ``uid``
    OTHER_BODY = "OTHER_BODY"  # the idempotency key has a request with another body, ``uid``
    DUPLICATE = "DUPLICATE"  # the client's id is in process; ``uid`` says as what
    FULL = "FULL"  # ``queued`` requests wait already
    TOO_LARGE = "TOO_LARGE"  # no living node of a role could ever hold it; the largest has ``room_tokens``
    TOMBSTONED = "TOMBSTONED"  # this uid was aborted before it came
    REFUSED = "REFUSED"  # the watcher's web process is not registered, silent, or dead: register again
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Admit:
    """Duplicate check (SET guard NX), capacity check and the record (QUEUED) in one step. By web.

    A request of several sequences (``n``, several prompts) is a group: a record for each, all admitted or none. They
    are claimed, computed, resumed and finish each for itself. One that ends in any other way takes the others with it:
    these end as it does, in the same step. Client id, key and deduplication are the group's, by the uid of its first
    record; they are free when the last one has ended.

    While prefill nodes live, one of their pools must be able to hold what a request that goes on elsewhere has to be
    computed from at the most, prompt + ``max_tokens`` - 1; while decode nodes live, one of theirs prompt +
    ``max_tokens``, unless prefill samples the only token.

    An idempotency key is looked at before the client's id. It is free again once its record is ABORTED, EXPIRED or
    gone; a FAILED one is replayed like a FINISHED one.
    """

    uid: str
    client_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    watcher: Watcher
    limits: Limits
    key: IdempotencyKey | None = None
    salt: str = ""
    """Only requests with the same one share cached KV."""
    more: tuple[Sibling, ...] = ()
    name: ClassVar[str] = "admit"


@dataclass(frozen=True, slots=True)
class AdmitAnswer:
    status: AdmitStatus
    time_ms: int
    uid: str = ""
    queued: int = 0
    room_tokens: int = 0
    admitted_wall_ms: int = 0
    """(ADMITTED) Phase ``queued`` of the record's timeline."""


class AbortStatus(StrEnum):
    ABORTED = "ABORTED"
    ENDED = "ENDED"  # it had ended before, in ``state``
    TOMBSTONED = "TOMBSTONED"  # unknown uid: a later ``admit`` of it is refused
    WATCHED = "WATCHED"  # (Detach) others still watch it
    GRACE = "GRACE"  # (Detach) nobody watches it any more: aborted after its grace, unless somebody attaches
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request as ABORTED, whatever it is doing; closes its leases. An unknown uid leaves a tombstone.

    Of a group any uid will do.
    """

    uid: str
    reason: str
    name: ClassVar[str] = "abort"


@dataclass(frozen=True, slots=True)
class Detach:
    """Remove one watcher; the last one gone aborts the request, after its grace. By web, when its client is gone.

    Of a group any uid will do.
    """

    uid: str
    watcher: Watcher
    name: ClassVar[str] = "detach"


@dataclass(frozen=True, slots=True)
class AbortAnswer:
    status: AbortStatus
    time_ms: int
    state: str = ""


PHASES = ("queued", "claimed", "granted", "first_token", "committed", "activated", "finished")
"""What a request goes through, in the order of an undisturbed one."""


class ReadStatus(StrEnum):
    FOUND = "FOUND"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Read one record by ``uid``, or (uid empty) the latest one of ``client_id``. Changes nothing."""

    uid: str = ""
    client_id: str = ""
    from_index: int = 0
    """Output tokens before this index are left out of the answer."""
    name: ClassVar[str] = "snapshot"


@dataclass(frozen=True, slots=True)
class SnapshotAnswer:
    status: ReadStatus
    time_ms: int
    uid: str = ""
    client_id: str = ""
    state: str = ""
    attempt: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    output_from: int = 0
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[str, ...] = ()
    """Of ``output_ids``, one each, where the request asks for them."""
    finish_reason: FinishReason | None = None
    error_code: str = ""
    """Why it FAILED / EXPIRED / was ABORTED: a FailureReason, ``queue_timeout``, or the abort's reason."""
    error_detail: str = ""
    prefill_node: str = ""
    """Node names, of the current or last attempt."""
    decode_node: str = ""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed for the first token."""
    choices: int = 1
    """(The first record of a group) How many there are."""
    timeline: Mapping[str, int] = field(default_factory=dict)
    """Phase (of ``PHASES``) → wall clock ms of the Redis server."""


class AttachStatus(StrEnum):
    ATTACHED = "ATTACHED"  # in process, and now watched by this watcher too
    ENDED = "ENDED"  # it ended before, as the record says: nothing more will come
    UNKNOWN = "UNKNOWN"
    REFUSED = "REFUSED"  # the watcher's web process is not registered, silent, or dead: register again
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Attach:
    """Watch a record that is there already, and read it, in one step: no event can fall between the two. By web.

    Of a group each record is watched for itself.
    """

    uid: str
    watcher: Watcher
    name: ClassVar[str] = "attach"


@dataclass(frozen=True, slots=True)
class AttachAnswer:
    status: AttachStatus
    time_ms: int
    record: SnapshotAnswer | None = None
    """With all output tokens; of ATTACHED and ENDED."""


@dataclass(frozen=True, slots=True)
class Event:
    """What the ledger appends to the stream of each web process that watches a request.

    Only a wake-up: it may be lost or doubled. Tokens carry their index, so a reader sees gaps and repeats.
    ``state`` is set on the terminal event; ``error_code``/``error_detail`` where that is not FINISHED;
    ``cached_tokens`` comes with the first token, and again with the end.
    """

    uid: str
    index: int
    tokens: tuple[int, ...]
    state: str = ""
    finish_reason: FinishReason | None = None
    error_code: str = ""
    error_detail: str = ""
    logprobs: tuple[str, ...] = ()
    """Of ``tokens``, one each, where the request asks for them."""
    cached_tokens: int = 0
