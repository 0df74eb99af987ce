"""One request as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from app.schemas import FinishReason, SamplingParams
from workers.engine.biases import Biases
from workers.engine.penalties import TokenCounts

if TYPE_CHECKING:
    from app.text import StopChecker

Ints = npt.NDArray[np.int64]


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
    logprobs: str = ""
    """Of the token, packed, if the sequence asks for them."""


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
    eos_token_ids: tuple[int, ...] = ()
    stop_checker: StopChecker | None = None
    """Of a sequence with stop strings; has seen all output ids."""
    stopped: bool = False
    """A stop string is complete."""
    token_ids: list[int] = field(init=False)
    """Prompt and output in one list."""
    counts: TokenCounts | None = field(init=False, default=None)
    """Of a sequence with penalties."""
    biases: Biases | None = field(init=False, default=None)
    """Of a sequence with ``logit_bias``."""
    banned: Ints | None = field(init=False, default=None)
    """What ``min_tokens`` keeps from being drawn now: EOS (with ``ignore_eos`` too, as in vLLM) and stop tokens."""
    ends: frozenset[int] = field(init=False)
    """Tokens that end the answer."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.token_ids = [*self.prompt_ids, *self.output_ids]
        if sampling.has_penalties:
            self.counts = TokenCounts(self.prompt_ids, self.output_ids)
        if sampling.logit_bias:
            self.biases = Biases.of(sampling.logit_bias)
        self.ends = frozenset(sampling.stop_token_ids)
        if len(self.output_ids) < sampling.min_tokens:
            self.banned = np.asarray(sorted(self.ends.union(self.eos_token_ids)), np.int64)
        if not sampling.ignore_eos:
            self.ends = self.ends.union(self.eos_token_ids)

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
        if len(self.output_ids) >= self.sampling.min_tokens:
            self.banned = None
        self.token_ids.append(token_id)
