"""What a search explores: which nodes and requests there are, how often what may go wrong, and the times.

The times keep the order of those of production (see ``app.settings``) and are otherwise as short as they can be: a
search has to see the end of each wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.protocol.commands import Limits
from app.schemas import SamplingParams
from tests.sim.model import reference

TICK_MS = 1000
"""Time never jumps further than this at once: rule 9 lets ledger time advance by a second per heartbeat."""
CALL_TTL_MS = 2000
NODE_TTL_MS = 1000
CHECK_S = 1.0
LINK_TIMEOUT_S = 1.0
DRAIN_MS = 2000
FROZEN_MOST_MS = NODE_TTL_MS + TICK_MS
"""A frozen process goes on at the latest when it has been declared dead for a while."""
NEVER_MS = 10**9
MANY = 10**9


class Fault(StrEnum):
    """What may go wrong."""

    CALL_LOST = "ledger call lost"
    ANSWER_LOST = "answer of the ledger lost"
    CALL_LATE = "ledger call applied later than its caller waits"
    MESSAGE_LOST = "message lost"
    MESSAGE_DOUBLED = "message doubled"
    MESSAGE_LATE = "message late"
    REPLY_LOST = "reply lost"
    BELL_LOST = "bell lost"
    BELL_DOUBLED = "bell doubled"
    CRASH_REPORTED = "crash, seen by the supervisor"
    CRASH_SILENT = "crash, seen by nobody"
    FREEZE = "process frozen"
    ROLLBACK = "ledger rolled back"
    EVERYTHING_LATE = "everything pending is late"


@dataclass(frozen=True, slots=True)
class Request:
    """One admission. ``after``: sent only when that uid has ended (or is unknown), under the same client id."""

    uid: str
    prompt: tuple[int, ...]
    max_tokens: int = 2
    client_id: str = "client"
    after: str = ""
    may_be_aborted: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=0, seed=len(self.uid), max_tokens=self.max_tokens, ignore_eos=True)

    @property
    def answer(self) -> tuple[int, ...]:
        """What an undisturbed run answers; needs none of the code under test."""
        return reference(self.prompt, self.sampling.seed, self.max_tokens, True)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A small cluster and everything that may happen to it."""

    name: str
    requests: tuple[Request, ...]
    prefill: int = 1
    decode: int = 1
    prefill_blocks: int = 1
    decode_blocks: int = 1
    faults: int = 0
    kinds: frozenset[Fault] = frozenset(Fault)
    max_attempts: int = 3
    drains: int = 0
    """How many nodes may be asked to drain."""
    first_token_timeout_ms: int = NEVER_MS
    grant_timeout_s: float = float("inf")

    @property
    def limits(self) -> Limits:
        return Limits(
            max_attempts=self.max_attempts,
            max_queued=100,
            queue_timeout_ms=NEVER_MS,
            first_token_timeout_ms=self.first_token_timeout_ms,
            record_ttl_ms=NEVER_MS,
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in the order in which a state lists them."""
        return tuple([f"p{n}" for n in range(self.prefill)] + [f"d{n}" for n in range(self.decode)])
