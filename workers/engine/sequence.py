"""One request as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.schemas import FinishReason, SamplingParams
from workers.engine.penalties import TokenCounts

if TYPE_CHECKING:
    from app.text import StopChecker


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one sequence.

    Either a token, at ``index`` of the answer, with a ``finish_reason`` if it ends the answer; or ``error``
    (and no token): the sequence could not be computed. After either end the engine has forgotten it.
    """

    key: str
    index: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one request.

    ``num_computed`` counts the tokens (of prompt + output) whose KV lies in the blocks of ``block_table``.
    ``output_ids`` includes what earlier attempts drew.
    """

    key: str
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: SamplingParams
    block_table: list[int]
    num_computed: int
    one_token: bool
    """Forget the sequence after one token: its KV is handed on."""
    stop_checker: StopChecker | None = None
    """Of a sequence with stop strings; has seen all output ids."""
    stopped: bool = False
    """A stop string is complete."""
    token_ids: list[int] = field(init=False)
    """Prompt and output in one list."""
    counts: TokenCounts | None = field(init=False, default=None)
    """Of a sequence with penalties."""

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids, *self.output_ids]
        if self.sampling.has_penalties:
            self.counts = TokenCounts(self.prompt_ids, self.output_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be drawn; 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_computed

    def append(self, token_id: int) -> None:
        """Take in the next token of the output."""
        if self.stop_checker is not None:
            self.stopped = self.stop_checker.push(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)
