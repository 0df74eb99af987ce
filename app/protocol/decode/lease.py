"""One lease on the decode node."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from app.protocol.blocks import blocks_for
from app.protocol.commands import Work
from app.protocol.holding import Held
from app.protocol.messages import Commit
from app.schemas import FinishReason


class Phase(StrEnum):
    """Where a lease stands on the decode node."""

    GRANTING = "granting"  # GRANT sent
    GRANTED = "granted"  # acknowledged; COMMIT is awaited
    PULLING = "pulling"  # the mover copies
    ACTIVATING = "activating"  # the ledger is asked to hand the request over
    RUNNING = "running"  # in the engine, or paused because the ledger is away


@dataclass(slots=True, kw_only=True)
class Lease(Held):
    """One lease. Keyed by its id, which this node drew."""

    prefill_incarnation: str
    prefill_address: str
    seq: int
    """Admission number of the request: who is younger is preempted first."""
    most_blocks: int
    """Blocks of the whole answer: it grows no further."""
    told_blocks: int
    """How many blocks the ledger knows of."""
    phase: Phase = Phase.GRANTING
    commit: Commit | None = None
    committed_at: float = 0.0
    work: Work | None = None
    output: list[int] = field(default_factory=list)
    """All output ids of the request, those of earlier attempts too."""
    logprobs: list[str] = field(default_factory=list)
    """Of each of them, "" of those drawn before; the whole list empty where the request does not ask for them."""
    told_length: int = 0
    """How many of them the ledger holds."""
    finish: FinishReason | None = None
    emitting: bool = False

    def needed_blocks(self, block_size_tokens: int, ahead: int = 0) -> int:
        """Blocks that the next step, or the one ``ahead`` steps later, reads and writes; none before it was activated.
        The last token's KV is never written."""
        if self.work is None:
            return 0
        prompt, most = len(self.work.prompt_ids), self.work.sampling.max_tokens
        return blocks_for(min(prompt + len(self.output) + ahead, prompt + most - 1), block_size_tokens)
