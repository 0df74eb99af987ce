"""The ledger's commands and answers: the only way in which any record changes.

Each command is one atomic step: one Lua script on the server (``lua/<name>.lua``), one method of the memory twin.
Times are *ledger time* in integer milliseconds unless a name says otherwise.

Every answer has ``status`` and ``time_ms``. Every write may answer ``LATE``: it arrived after its ``not_after_ms``
and changed nothing (rule 2). Repeating a command with the same fence, lease id or uid answers as the first time did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from app.schemas import FinishReason, Gauges, NodeInfo, SamplingParams


class FailureKind(StrEnum):
    """What ending an attempt means for its request."""

    FAILURE = "failure"
    """Counts against ``max_attempts``; QUEUED again while some are left, else FAILED."""
    OVERLOAD = "overload"
    """Nobody's fault: QUEUED again, attempt + 1, the failure count stays."""
    FINAL = "final"
    """A retry does not help: FAILED at once."""


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


@dataclass(frozen=True, slots=True)
class Work:
    """What a node needs to compute an attempt. Output tokens are those already emitted by earlier attempts too."""

    uid: str
    client_id: str
    attempt: int
    fence: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams


# requests


class AdmitStatus(StrEnum):
    ADMITTED = "ADMITTED"
    DUPLICATE = "DUPLICATE"  # the client's id is in process; ``uid`` says as what
    FULL = "FULL"  # ``queued`` requests wait already
    TOO_LARGE = "TOO_LARGE"  # no living node of a role could ever hold it; the largest has ``room_tokens``
    TOMBSTONED = "TOMBSTONED"  # this uid was aborted before it came
    REFUSED = "REFUSED"  # the watcher's web process is not registered, silent, or dead: register again
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Admit:
    """Duplicate check (SET guard NX), capacity check and the record (QUEUED) in one step. By web.

    While prefill nodes live, one of their pools must be able to hold the prompt; while decode nodes live, one of
    theirs prompt + ``max_tokens``, unless prefill samples the only token.
    """

    uid: str
    client_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    watcher: Watcher
    limits: Limits
    name: ClassVar[str] = "admit"


@dataclass(frozen=True, slots=True)
class AdmitAnswer:
    status: AdmitStatus
    time_ms: int
    uid: str = ""
    queued: int = 0
    room_tokens: int = 0


class AbortStatus(StrEnum):
    ABORTED = "ABORTED"
    ENDED = "ENDED"  # it had ended before, in ``state``
    TOMBSTONED = "TOMBSTONED"  # unknown uid: a later ``admit`` of it is refused
    WATCHED = "WATCHED"  # (Detach) others still watch it
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request as ABORTED, whatever it is doing; closes its lease. An unknown uid leaves a tombstone."""

    uid: str
    reason: str
    name: ClassVar[str] = "abort"


@dataclass(frozen=True, slots=True)
class Detach:
    """Remove one watcher; the last one gone aborts the request. By web, when its client is gone."""

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
    finish_reason: FinishReason | None = None
    error_code: str = ""
    """Why it FAILED / EXPIRED / was ABORTED: a FailureReason, ``queue_timeout``, or the abort's reason."""
    error_detail: str = ""
    prefill_node: str = ""
    """Node names, of the current or last attempt."""
    decode_node: str = ""
    timeline: Mapping[str, int] = field(default_factory=dict)
    """Phase (of ``PHASES``) → wall clock ms of the Redis server."""


# prefill side


class ClaimStatus(StrEnum):
    CLAIMED = "CLAIMED"
    NOTHING = "NOTHING"
    REFUSED = "REFUSED"  # this incarnation is unknown, dead or draining
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Claim:
    """Take the hinted record if it is QUEUED and fits, unless an older one has waited over 2 s; else the oldest that
    fits.

    ``fence`` is drawn by the caller for this one call. QUEUED → PREFILLING; the record goes into ``owned`` of
    ``incarnation`` and, if more than one token is still to come, into the list of those that wait for a grant.
    Fits: ceil((prompt + output) / block_size_tokens) <= free_blocks. A fence that already owns a record answers with
    it.
    """

    hint_uid: str
    incarnation: str
    fence: str
    free_blocks: int
    block_size_tokens: int
    name: ClassVar[str] = "claim"


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    status: ClaimStatus
    time_ms: int
    work: Work | None = None


class FailStatus(StrEnum):
    REQUEUED = "REQUEUED"  # QUEUED again as ``attempt``: ring prefill
    FAILED = "FAILED"
    FENCED = "FENCED"  # the attempt is not the caller's (any more); nothing changed
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class FailAttempt:
    """End an attempt and its lease. The owner may; a decode node may with the lease it holds for this attempt."""

    uid: str
    attempt: int
    fence: str
    incarnation: str
    lease_id: str
    """Empty for prefill; the decode node's lease otherwise."""
    kind: FailureKind
    reason: str
    detail: str
    name: ClassVar[str] = "fail_attempt"


@dataclass(frozen=True, slots=True)
class FailAnswer:
    status: FailStatus
    time_ms: int
    attempt: int = 0


# decode side


class ReserveStatus(StrEnum):
    RESERVED = "RESERVED"
    NOTHING = "NOTHING"
    REFUSED = "REFUSED"
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class ReserveNext:
    """Give this decode node the hinted waiter, or the oldest by admission, that fits: one lease per attempt.

    Fits: ceil((prompt + max_tokens) / block_size_tokens) <= free_blocks. Waiters whose record moved on are dropped.
    A lease id that already holds a lease answers with it. ``LATE`` and ``NOTHING`` reserve nothing.
    """

    hint_uid: str
    incarnation: str
    lease_id: str
    free_blocks: int
    block_size_tokens: int
    name: ClassVar[str] = "reserve_next"


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    status: ReserveStatus
    time_ms: int
    uid: str = ""
    client_id: str = ""
    attempt: int = 0
    fence: str = ""
    blocks: int = 0
    """Blocks the lease holds."""
    prefill_incarnation: str = ""
    prefill_address: str = ""


class ActivateStatus(StrEnum):
    ACTIVATED = "ACTIVATED"  # or had been, by this same lease
    FENCED = "FENCED"  # not this attempt's fence or lease any more, or not PREFILLING
    DIFFERENT = "DIFFERENT"  # the ledger holds another token at this index
    GAP = "GAP"  # tokens before ``index`` are missing in the ledger
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Activate:
    """PREFILLING → DECODING, lease RESERVED → ACTIVE, owner becomes the decode node; writes ``token`` if it was
    lost."""

    uid: str
    attempt: int
    fence: str
    lease_id: str
    incarnation: str
    index: int
    """Index in the answer of the token that prefill sampled."""
    token: int
    committed_ago_ms: int = 0
    """How long ago COMMIT arrived, for the timeline."""
    name: ClassVar[str] = "activate"


@dataclass(frozen=True, slots=True)
class ActivateAnswer:
    status: ActivateStatus
    time_ms: int
    work: Work | None = None


# both


class EmitStatus(StrEnum):
    OK = "OK"
    SAME = "SAME"  # these tokens (and this end) are there already
    GAP = "GAP"  # the ledger holds ``length`` tokens: send again from there
    DIFFERENT = "DIFFERENT"  # other tokens stand at these indexes
    FENCED = "FENCED"  # not the owner, not the fence, or the request has ended in another way
    ABORTED = "ABORTED"  # the request was aborted
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Emit:
    """Append ``tokens`` at ``index`` of the answer. With ``finish_reason`` it ends the request in the same step:
    terminal state, lease release, guard release, terminal event. By the owner only."""

    uid: str
    attempt: int
    fence: str
    incarnation: str
    index: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    name: ClassVar[str] = "emit"


@dataclass(frozen=True, slots=True)
class EmitAnswer:
    status: EmitStatus
    time_ms: int
    length: int = 0


# nodes


class NodeStatus(StrEnum):
    OK = "OK"
    UNKNOWN = "UNKNOWN"  # not registered (any more), or declared dead: let go of everything, then register again
    REFUSED = "REFUSED"  # ``detail`` says why (model or layout mismatch, exit already reported, still owns)
    DRAINING = "DRAINING"  # (Heartbeat) alive, and asked to drain
    LATE = "LATE"  # (Drain, Deregister)


@dataclass(frozen=True, slots=True)
class Register:
    """Make a node known. Exempt from not_after.

    REFUSED while others live that have another ``model``, or (between nodes that hold KV) another ``layout``. One of
    those others that is silent is declared dead instead: its next beat must not bring it back beside this node.
    """

    node: NodeInfo
    node_ttl_ms: int
    name: ClassVar[str] = "register"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Advances ledger time; never re-creates an entry. Exempt from not_after."""

    incarnation: str
    gauges: Gauges
    name: ClassVar[str] = "heartbeat"


@dataclass(frozen=True, slots=True)
class Drain:
    """Mark a node as draining: it gets no new claims, reservations or activations of new leases."""

    incarnation: str
    name: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True)
class Deregister:
    """Take a node's entry away. REFUSED while it owns anything."""

    incarnation: str
    name: ClassVar[str] = "deregister"


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    status: NodeStatus
    time_ms: int
    detail: str = ""
    run_id: str = ""
    """Identity of the ledger server's life; a change means restart or failover."""


@dataclass(frozen=True, slots=True)
class ReportExit:
    """A supervisor saw the process of ``incarnation`` end: mark it dead, fail what it owns, remove it. Final."""

    incarnation: str
    name: ClassVar[str] = "report_exit"


@dataclass(frozen=True, slots=True)
class Bell:
    """A doorbell to ring: a Celery message on ``queue`` ("prefill" or "decode") with only these ids in it."""

    queue: str
    uid: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Scan:
    """release_expired_preallocations, recover_orphans, ring_again: does nothing if the last scan is younger than
    ``min_age_ms``. Bounded work per call (``more`` says that some is left). Exempt from not_after; advances ledger
    time."""

    min_age_ms: int
    name: ClassVar[str] = "scan"


@dataclass(frozen=True, slots=True)
class ScanAnswer:
    """Answer of ``Scan`` and ``ReportExit``."""

    ran: bool
    time_ms: int
    bells: tuple[Bell, ...] = ()
    expired: tuple[str, ...] = ()
    """uids that ended EXPIRED or whose lease expired."""
    recovered: tuple[str, ...] = ()
    """uids whose attempt was failed because its node is gone."""
    dead: tuple[str, ...] = ()
    """Incarnations declared dead."""
    more: bool = False


@dataclass(frozen=True, slots=True)
class HeldClaim:
    uid: str
    attempt: int
    fence: str
    state: str
    older_waits: bool = False
    """A request that was admitted earlier is QUEUED (it may be a resumed one)."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    lease_id: str
    uid: str
    attempt: int
    fence: str
    state: str


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the ledger says this node owns and leases (rule 3). Changes nothing."""

    incarnation: str
    name: ClassVar[str] = "holdings"


@dataclass(frozen=True, slots=True)
class HoldingsAnswer:
    status: ReadStatus  # UNKNOWN: the node is not registered
    time_ms: int
    claims: tuple[HeldClaim, ...] = ()
    leases: tuple[HeldLease, ...] = ()
    queued: int = 0
    """Requests that wait for a prefill node."""
    waiting_for_grant: int = 0
    """Requests that wait for a decode node."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and leases, for ``/cluster``. Changes nothing."""

    name: ClassVar[str] = "cluster"


@dataclass(frozen=True, slots=True)
class ClusterNode:
    node: NodeInfo
    gauges: Gauges
    state: str
    """alive, draining, stale (heartbeat older than its TTL) or dead."""
    heartbeat_age_ms: int


@dataclass(frozen=True, slots=True)
class ClusterLease:
    lease_id: str
    uid: str
    client_id: str
    attempt: int
    node: str
    """Name of the decode node."""
    state: str
    age_ms: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    time_ms: int
    nodes: tuple[ClusterNode, ...] = ()
    leases: tuple[ClusterLease, ...] = ()
    queued: int = 0
    waiting_for_grant: int = 0


# events


@dataclass(frozen=True, slots=True)
class Event:
    """What the ledger appends to the stream of each web process that watches a request.

    Only a wake-up: it may be lost or doubled. Tokens carry their index, so a reader sees gaps and repeats.
    ``state`` is set on the terminal event; ``error_code``/``error_detail`` where that is not FINISHED.
    """

    uid: str
    index: int
    tokens: tuple[int, ...]
    state: str = ""
    finish_reason: FinishReason | None = None
    error_code: str = ""
    error_detail: str = ""


Command = (
    Admit
    | Abort
    | Detach
    | Snapshot
    | Claim
    | FailAttempt
    | ReserveNext
    | Activate
    | Emit
    | Register
    | Heartbeat
    | Drain
    | Deregister
    | ReportExit
    | Scan
    | Holdings
    | Cluster
)
Answer = (
    AdmitAnswer
    | AbortAnswer
    | SnapshotAnswer
    | ClaimAnswer
    | FailAnswer
    | ReserveAnswer
    | ActivateAnswer
    | EmitAnswer
    | NodeAnswer
    | ScanAnswer
    | HoldingsAnswer
    | ClusterAnswer
)
EXEMPT_FROM_NOT_AFTER: frozenset[type] = frozenset({Register, Heartbeat, Scan, ReportExit, Snapshot, Holdings, Cluster})
