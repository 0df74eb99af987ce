"""What prefill and decode nodes ask about one attempt: claim, stamp, reserve_next, activate, emit, fail_attempt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from app.schemas import FinishReason, SamplingParams


class FailureKind(StrEnum):
    """What ending an attempt means for its request."""

    FAILURE = "failure"
    """Counts against ``max_attempts``; QUEUED again while some are left, else FAILED."""
    OVERLOAD = "overload"
    """Nobody's fault: QUEUED again, attempt + 1, the failure count stays."""
    FINAL = "final"
    """A retry does not help: FAILED at once."""


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
    salt: str = ""
    """Whose KV it may start from: that of requests with the same salt."""


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
    Fits: ceil((prompt + output) / block_size_tokens) <= free_blocks, and of two suspects (see ``Stamp``) a node gets
    one. A fence that already owns a record answers with it.
    """

    hint_uid: str
    incarnation: str
    fence: str
    free_blocks: int
    block_size_tokens: int
    stamp: bool = False
    """Its next step computes what is claimed: stamp it as ``Stamp`` does."""
    name: ClassVar[str] = "claim"


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    status: ClaimStatus
    time_ms: int
    work: Work | None = None
    queue_empty: bool = False
    """NOTHING, and nobody at all is QUEUED: who comes next will ring."""


class StampStatus(StrEnum):
    OK = "OK"
    FENCED = "FENCED"
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Say that this attempt's sequence enters (or, not ``in_step``, has left) the prefill node's running steps.

    A node's loss is a failure of what it may have been computing at that moment, and of nothing else: of stamped
    PREFILLING attempts and of DECODING ones. One that leaves its request a single failure to go makes it a *suspect*
    until it has added 16 tokens: it may be what kills its nodes, so a node never gets two of them at once. A loss that
    does not count is overload; from the fifth in one request's life on it counts all the same.
    """

    uid: str
    attempt: int
    fence: str
    incarnation: str
    in_step: bool
    name: ClassVar[str] = "stamp"


@dataclass(frozen=True, slots=True)
class StampAnswer:
    status: StampStatus
    time_ms: int


class FailStatus(StrEnum):
    REQUEUED = "REQUEUED"  # QUEUED again as ``attempt``: ring prefill
    FAILED = "FAILED"
    FENCED = "FENCED"  # the attempt is not the caller's (any more); nothing changed
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class FailAttempt:
    """End an attempt and its lease. The owner may; a decode node may with the lease it holds for this attempt.

    With ``avoid_pair`` its prefill and its decode node failed each other: while other decode nodes could take the
    work, they are not brought together for 2 s, and each time it happens again for twice as long, up to 8 s. For as
    long this request is left to other prefill nodes, while there are any: its own may be cut off from every decode
    node. An activation between the two makes it good.
    """

    uid: str
    attempt: int
    fence: str
    incarnation: str
    lease_id: str
    """Empty for prefill; the decode node's lease otherwise."""
    kind: FailureKind
    reason: str
    detail: str
    avoid_pair: bool = False
    name: ClassVar[str] = "fail_attempt"


@dataclass(frozen=True, slots=True)
class FailAnswer:
    status: FailStatus
    time_ms: int
    attempt: int = 0


class ReserveStatus(StrEnum):
    RESERVED = "RESERVED"
    NOTHING = "NOTHING"
    REFUSED = "REFUSED"
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class ReserveNext:
    """Give this decode node the hinted waiter, or the oldest by admission, that fits: one lease per attempt.

    A lease starts with the blocks of prompt + output so far and one more; the node adds others as the answer grows, up
    to those of prompt + ``max_tokens``, which its pool must be able to hold. Fits: what it starts with <= free_blocks,
    of two suspects (see ``Stamp``) a node gets one, and nodes that just failed each other (see ``FailAttempt``) are
    kept apart. The hint does not pass the oldest that fits if that was requeued or has waited for long. Waiters whose
    record moved on are dropped.
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
    """Blocks that the lease starts with."""
    most_blocks: int = 0
    """Blocks that it may grow to."""
    seq: int = 0
    """Admission number of the request: a smaller one is older."""
    prefill_incarnation: str = ""
    prefill_address: str = ""
    queue_empty: bool = False
    """NOTHING, and nobody at all waits for a grant: who comes next will ring."""


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
    logprobs: str = ""
    """Of ``token``, as in ``Emit``."""
    cached_tokens: int = 0
    """As in ``Emit``, of the token that was lost."""
    name: ClassVar[str] = "activate"


@dataclass(frozen=True, slots=True)
class ActivateAnswer:
    status: ActivateStatus
    time_ms: int
    work: Work | None = None


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
    terminal state, lease release, guard release, terminal event. By the owner only.

    What was told of a token first stands: whether one is there already is asked of the token, not of its logprobs,
    which another run may round differently. ``blocks``: so many the lease holds by now; 0: as before.
    """

    uid: str
    attempt: int
    fence: str
    incarnation: str
    index: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[str, ...] = ()
    """One per token (``app.logprobs``, opaque to the ledger), or none at all."""
    blocks: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that this attempt did not compute; kept with the first token of the answer."""
    name: ClassVar[str] = "emit"


@dataclass(frozen=True, slots=True)
class EmitAnswer:
    status: EmitStatus
    time_ms: int
    length: int = 0
