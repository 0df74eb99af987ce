"""Draws tokens. A draw is a pure function of (seed, index, logits): a resumed answer draws the same again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app.schemas import SamplingParams

Floats = npt.NDArray[np.float32]

_SPAN = 256
"""Candidates are summed in spans of this many, so that a draw scans two short arrays instead of the vocabulary."""


def greedy(logits: Floats) -> npt.NDArray[np.int64]:
    """[n, vocab] -> [n]: the most likely token, the lowest id of equals."""
    best: npt.NDArray[np.int64] = np.argmax(logits, axis=-1)
    return best


def finite(logits: Floats) -> npt.NDArray[np.bool_]:
    """[n, vocab] -> [n]: whether all of a row's logits are numbers."""
    whole: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(logits), axis=-1)
    return whole


def draw(logits: Floats, sampling: SamplingParams, index: int) -> int:
    """Draw the token at ``index`` of an answer from finite logits [vocab].

    Temperature first, then min-p, then top-k, then top-p over what is left. The kept tokens are walked in the order of
    their ids, not of their probability: rounding may swap two near equals in a sorted order, and then the same
    uniform number would hit another token.
    """
    if sampling.temperature == 0:
        return int(greedy(logits[None])[0])
    weights = filtered_weights(logits, sampling)
    return _pick(weights, uniform(sampling.seed, index))


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the token at ``index``: the first word of Philox-4x64 with that key and counter."""
    generator = np.random.Philox(key=seed % 2**64, counter=index)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def filtered_weights(logits: Floats, sampling: SamplingParams) -> Floats:
    """Unnormalised probabilities [vocab], 0 for what min-p, top-k and top-p leave out. The likeliest token has 1.

    One row at a time: a batch as one matrix does not fit the caches, and takes twice as long. So what else is in a
    batch cannot change a draw.

    Tokens that tie with the last one kept are kept too, so that the order of equals decides nothing.
    """
    scaled = (logits - logits.max()) / np.float32(max(sampling.temperature, 1e-5))
    weights: Floats = np.exp(scaled)
    if sampling.min_p > 0:
        weights[weights < np.float32(sampling.min_p)] = 0
    if 0 < sampling.top_k < len(weights):
        kth = np.partition(weights, -sampling.top_k)[-sampling.top_k]
        weights[weights < kth] = 0
    if sampling.top_p < 1:
        weights[weights < _nucleus_floor(weights, sampling.top_p)] = 0
    return weights


def _nucleus_floor(weights: Floats, top_p: float) -> np.float32:
    """The weight of the token with which the most likely ones reach ``top_p`` of the total."""
    total = float(weights.sum(dtype=np.float64))
    # All tokens below this bound together weigh at most (1 - top_p) * total: none of them is in the nucleus.
    bound = (1 - top_p) * total / len(weights)
    candidates = np.sort(weights[weights >= bound])[::-1]
    reached = np.cumsum(candidates, dtype=np.float64) >= top_p * total
    return np.float32(candidates[int(np.argmax(reached)) if reached.any() else -1])


def _pick(weights: Floats, uniform_number: float) -> int:
    """The first token at which the running sum passes ``uniform_number`` of the total."""
    spans = np.add.reduceat(weights, np.arange(0, len(weights), _SPAN), dtype=np.float64)
    sums = np.cumsum(spans)
    target = uniform_number * sums[-1]
    span = min(int(np.searchsorted(sums, target, side="right")), int(np.flatnonzero(spans)[-1]))
    start = span * _SPAN
    inside = weights[start : start + _SPAN]
    before = sums[span - 1] if span else 0.0
    position = int(np.searchsorted(before + np.cumsum(inside, dtype=np.float64), target, side="right"))
    return start + min(position, int(np.flatnonzero(inside)[-1]))
