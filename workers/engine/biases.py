"""What a request asks of single tokens before anything is drawn: ``logit_bias``, and the bans of ``min_tokens``."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from workers.engine.sequence import Sequence

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Biases:
    """Token ids, and what is added to the logit of each."""

    token_ids: Ints
    values: Floats

    @classmethod
    def of(cls, logit_bias: Sequence_[tuple[int, float]]) -> Biases:
        """Of ``SamplingParams.logit_bias``."""
        token_ids, values = zip(*logit_bias, strict=True)
        return cls(np.asarray(token_ids, np.int64), np.asarray(values, np.float32))


def add_biases(logits: Floats, sequences: Sequence_[Sequence]) -> None:
    """Add to ``logits`` [n, vocab] in place: to row i the biases of ``sequences[i]``. Comes before the penalties, as in
    vLLM. Free where nobody has any."""
    biased = [(row, each.biases) for row, each in enumerate(sequences) if each.biases is not None]
    if biased:
        rows = np.repeat([row for row, _ in biased], [len(biases.token_ids) for _, biases in biased])
        token_ids = np.concatenate([biases.token_ids for _, biases in biased])
        logits[rows, token_ids] += np.concatenate([biases.values for _, biases in biased])


def ban(logits: Floats, sequences: Sequence_[Sequence]) -> None:
    """Set to -inf what a sequence may not draw yet. Comes last, so that nothing lifts it."""
    banned = [(row, each.banned) for row, each in enumerate(sequences) if each.banned is not None]
    if banned:
        rows = np.repeat([row for row, _ in banned], [len(token_ids) for _, token_ids in banned])
        logits[rows, np.concatenate([token_ids for _, token_ids in banned])] = -np.inf
