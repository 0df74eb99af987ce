"""Penalties on tokens that stand there already: a function of prompt and output ids, whichever attempt drew them."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from workers.engine.sequence import Sequence

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_LIMIT = 1e30
"""Beyond any logit, and float32 still holds it divided by the smallest temperature: no penalty makes an infinity."""


class TokenCounts:
    """The distinct tokens of a sequence, sorted, and how often its output has each: what a penalty touches.

    Some hundred numbers instead of one per token of the vocabulary.
    """

    def __init__(self, prompt_ids: Sequence_[int], output_ids: Sequence_[int]) -> None:
        self.token_ids, places = np.unique(np.asarray([*prompt_ids, *output_ids], np.int64), return_inverse=True)
        self.in_output: Ints = np.bincount(places[len(prompt_ids) :], minlength=len(self.token_ids))

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        place = int(np.searchsorted(self.token_ids, token_id))
        if place == len(self.token_ids) or self.token_ids[place] != token_id:
            self.token_ids = np.insert(self.token_ids, place, token_id)
            self.in_output = np.insert(self.in_output, place, 0)
        self.in_output[place] += 1


def apply_penalties(logits: Floats, sequences: Sequence_[Sequence]) -> None:
    """Change ``logits`` [n, vocab] in place: row i as the penalties of ``sequences[i]`` say. Free where nobody has any.

    In vLLM's order (``apply_penalties`` in vllm/model_executor/layers/utils.py):

    * ``repetition_penalty`` r, over prompt and output: a negative logit is multiplied by r, any other divided, once,
      however often the token occurs. transformers' ``RepetitionPenaltyLogitsProcessor``
      (generation/logits_process.py), after CTRL (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
    * ``frequency_penalty`` f and ``presence_penalty`` p, over the output alone: a token that occurs c > 0 times loses
      c * f + p. OpenAI's API reference, "Frequency and presence penalties".
    """
    penalised = [(row, each, each.counts) for row, each in enumerate(sequences) if each.counts is not None]
    if not penalised:
        return
    lengths = [len(counts.token_ids) for _, _, counts in penalised]
    rows = np.repeat([row for row, _, _ in penalised], lengths)
    token_ids = np.concatenate([counts.token_ids for _, _, counts in penalised])
    in_output = np.concatenate([counts.in_output for _, _, counts in penalised])
    repetition = np.repeat([each.sampling.repetition_penalty for _, each, _ in penalised], lengths)
    frequency = np.repeat([each.sampling.frequency_penalty for _, each, _ in penalised], lengths)
    presence = np.repeat([each.sampling.presence_penalty for _, each, _ in penalised], lengths)
    values = logits[rows, token_ids].astype(np.float64)
    with np.errstate(over="ignore"):
        values = np.where(values < 0, values * repetition, values / repetition)
    values -= frequency * in_output + presence * (in_output > 0)
    logits[rows, token_ids] = np.clip(values, -_LIMIT, _LIMIT)
