"""One claimed attempt on the prefill node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.protocol import events as on
from app.protocol.commands import Work
from app.protocol.holding import Held
from app.protocol.messages import Grant


class Phase(StrEnum):
    """Where a claimed attempt stands on the prefill node."""

    IN_LINE = "in_line"
    COMPUTING = "computing"  # in the engine, or about to be: its stamp or the check of known blocks is on the way
    COMPUTED = "computed"  # first token known, blocks being digested; waits for a grant
    SEALING = "sealing"  # grant held; first token on its way to the ledger, blocks perhaps still being digested
    COMMITTING = "committing"  # COMMIT sent
    COMMITTED = "committed"  # receipt acknowledged; the result of the pull is awaited


@dataclass(slots=True, kw_only=True)
class Attempt(Held):
    """One claimed attempt. Keyed by its fence, which this node drew."""

    work: Work
    generations: tuple[int, ...]
    """Of ``blocks``, as they were taken or pinned (rule 6)."""
    keys: tuple[str, ...]
    """Of the full blocks; empty where nothing is cached."""
    num_cached: int = 0
    """So many of the first ``blocks`` were known: they are read, not written."""
    claimed_at: float
    stamped: bool = False
    """The ledger counts this node's loss as a failure of this attempt."""
    phase: Phase = Phase.IN_LINE
    grant: Grant | None = None
    rings: int = 0
    token: int = -1
    logprobs: str = ""
    first_token_told: bool = False
    patience: int = 0
    """Number of the running wait for decode's answer; a timer of an earlier one finds itself superseded."""
    sealed: on.Sealed | None = None
    finishing: bool = False
    """Its first token ends the answer; tokens and end are on their way to the ledger."""
    older_waited: bool = False
    """At the last check a request that was admitted earlier was QUEUED."""
    yields: bool = False
    """Given up so that an older request can have the room: nothing is claimed before its blocks are free."""

    @property
    def index(self) -> int:
        """Index in the answer of the token this attempt samples."""
        return len(self.work.output_ids)

    @property
    def num_tokens(self) -> int:
        """Positions whose KV this attempt hands over."""
        return len(self.work.prompt_ids) + len(self.work.output_ids)

    def num_computed(self, block_size_tokens: int) -> int:
        """Positions whose KV lies in known blocks."""
        return self.num_cached * block_size_tokens

    def cached_tokens(self, block_size_tokens: int) -> int:
        """Tokens of the prompt that are not computed."""
        return min(self.num_computed(block_size_tokens), len(self.work.prompt_ids))
