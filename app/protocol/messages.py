"""What a prefill and a decode node say to each other. Versioned; anything malformed or stale is refused by name.

=============  =========  =============================================================
message        direction  means
=============  =========  =============================================================
Grant          D -> P     "I hold blocks for this attempt, under this lease."
Commit         P -> D     "The KV is computed; pull it from here."
Activating     D -> P     "I have pulled it, and the ledger does not answer: keep waiting."
PullResult     D -> P     "I have pulled and activated it", or why not.
=============  =========  =============================================================

Each is an acknowledged call: the answer is a Reply. Uid, attempt, fence and lease id travel with every one, so that
a message of an earlier attempt can never be taken for the current one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from app.logprobs import MAX_PACKED
from app.protocol.commands import FailureKind
from app.protocol.tables import FailureReason
from app.schemas import Frozen, KVLocation
from app.versions import LOGPROBS, SPOKEN, Since

Id = Annotated[str, Field(min_length=1, max_length=128)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Version = Annotated[int, Field(ge=SPOKEN.oldest, le=SPOKEN.newest)]
"""Who sends a message writes it as the ledger's version says: see ``versions.written_as``."""


class Refusal(StrEnum):
    """Why a call was refused. A typed reason for everything that can be wrong with one."""

    NONE = ""
    MALFORMED = "malformed"
    VERSION = "version"  # of a version that is not read here
    INCARNATION = "incarnation"  # addressed to an earlier life of this process
    EXPIRED = "expired"  # its deadline had passed when it was read
    UNKNOWN_ATTEMPT = "unknown_attempt"
    STALE_FENCE = "stale_fence"
    OTHER_LEASE = "other_lease"
    WRONG_PHASE = "wrong_phase"
    BLOCK_COUNT = "block_count"
    WRONG_ROLE = "wrong_role"
    HANDED_BACK = "handed_back"  # the attempt is being handed back: nobody's failure
    NOT_YET = "not_yet"  # the ledger has not yet said whether this attempt is ours: ask again


NOBODYS = frozenset({Refusal.HANDED_BACK, Refusal.UNKNOWN_ATTEMPT, Refusal.OTHER_LEASE, Refusal.INCARNATION})
"""Refusals that are nobody's failure: the attempt was handed back; the ledger gave it to a node that does not hold it
(a call applied late) or forgot that it had given it (a rollback); the process that held it is gone."""


class HandoffMessage(Frozen):
    """What every message carries."""

    v: Version = SPOKEN.newest
    uid: Id
    attempt: Annotated[int, Field(ge=1)]
    fence: Id
    lease_id: Id


class Grant(HandoffMessage):
    """A decode node holds blocks for this attempt."""

    kind: Literal["grant"] = "grant"
    decode_incarnation: Id
    decode_address: Id


class Commit(HandoffMessage):
    """The KV of ``num_tokens`` positions lies in ``blocks`` of the pool at ``location``.

    ``generations`` and ``digests`` (xxh3-128, hex) are per block, in the order of ``blocks``. ``token`` is what
    prefill sampled for position ``index`` of the answer, ``logprobs`` what goes with it.
    """

    kind: Literal["commit"] = "commit"
    index: Index
    token: Token
    num_tokens: Annotated[int, Field(ge=1)]
    location: KVLocation
    blocks: tuple[Index, ...]
    generations: tuple[int, ...]
    digests: tuple[Annotated[str, Field(pattern="^[0-9a-f]{32}$")], ...]
    logprobs: Annotated[str, Field(max_length=MAX_PACKED), Since(LOGPROBS)] = ""
    cached_tokens: Annotated[Index, Since(4)] = 0
    """Tokens of the prompt that this attempt did not compute, should the ledger lose the first token."""


class Activating(HandoffMessage):
    """The pull went well; the ledger, asked to activate, is silent. Nobody's failure: prefill waits anew."""

    kind: Literal["activating"] = "activating"


class PullResult(HandoffMessage):
    """How the pull and activation of a commit ended. Prefill frees its blocks on either outcome.

    Unless ``activated``, ``failure`` says what that means for the request: both sides tell the ledger the same.
    """

    kind: Literal["pull_result"] = "pull_result"
    activated: bool
    failure: FailureKind = FailureKind.FAILURE
    reason: FailureReason | None = None
    detail: str = ""


class Reply(Frozen):
    """The acknowledgement of a call: accepted, or refused with a reason."""

    v: Version = SPOKEN.newest
    accepted: bool
    reason: Refusal = Refusal.NONE
    detail: str = ""


ACCEPTED = Reply(accepted=True)


def refused(reason: Refusal, detail: str = "") -> Reply:
    """A Reply that says no."""
    return Reply(accepted=False, reason=reason, detail=detail)


Message = Grant | Commit | Activating | PullResult
MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])
"""Reads any message; raises pydantic.ValidationError for anything malformed or of another version."""
