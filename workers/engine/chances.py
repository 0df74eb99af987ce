"""Logprobs: of the model's own distribution, before biases, penalties and temperature, as OpenAI and vLLM give them."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from app.logprobs import TokenLogprobs

if TYPE_CHECKING:
    from workers.engine.sequence import Sequence

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def keep(logits: Floats, sequences: Sequence_[Sequence]) -> dict[int, Floats]:
    """Copies of the rows of ``logits`` [n, vocab] whose sequences ask for logprobs, before anything changes them."""
    return {row: logits[row].copy() for row, each in enumerate(sequences) if each.sampling.logprobs is not None}


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the token that was drawn, and of the ``num_top`` likeliest, from finite logits [vocab].

    A row for itself, in float64: the same numbers whatever else is in the batch. Of equals the lower ids come first.
    """
    shifted = logits.astype(np.float64) - float(logits.max())
    total = float(np.log(np.exp(shifted).sum()))
    top = [(int(each), float(shifted[each]) - total) for each in _likeliest(logits, num_top)]
    return TokenLogprobs(float(shifted[token_id]) - total, tuple(top))


def _likeliest(logits: Floats, count: int) -> Ints:
    """Ids of the ``count`` largest of ``logits`` [vocab], the largest first."""
    count = min(count, len(logits))
    if count == 0:
        return np.empty(0, np.int64)
    floor = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= floor)
    order = np.lexsort((candidates, -logits[candidates]))
    return candidates[order][:count]
