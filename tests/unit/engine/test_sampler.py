"""The sampler against slow, separate implementations and against statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.schemas import SamplingParams
from workers.engine import sampler


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 1, "max_tokens": 1} | changes))


def philox_first_word(key: int, counter: int) -> int:
    """Philox4x64-10 (Salmon et al., SC 2011), word 0 of the block at ``counter + 1``: numpy counts before it draws."""
    mask = 2**64 - 1
    words, keys = [(counter + 1) & mask, 0, 0, 0], [key & mask, 0]
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(high >> 64) ^ words[1] ^ keys[0], high & mask, (low >> 64) ^ words[3] ^ keys[1], low & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words[0]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -1, -(2**63), 123456789])
@pytest.mark.parametrize("index", [0, 1, 4095])
def test_the_uniform_number_is_philox(seed: int, index: int) -> None:
    assert sampler.uniform(seed, index) == (philox_first_word(seed, index) >> 11) / 2**53


def kept_slowly(logits: np.ndarray, sampling: SamplingParams) -> set[int]:
    """Which tokens survive the filters, by full sorts in float64."""
    chances = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    order = np.argsort(-chances)
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p == 1:
        return set(order.tolist())
    sums = np.cumsum(chances[order]) / chances[order].sum()
    return {int(token) for token in order[: int(np.argmax(sums >= sampling.top_p - 1e-12)) + 1]}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([2, 5, 255, 256, 257, 3000]),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
)
def test_filters_keep_what_full_sorts_keep(seed: int, vocab: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal(vocab) * 4).astype(np.float32)
    sampling = params(temperature=temperature, top_k=top_k, top_p=top_p)
    weights = sampler.filtered_weights(logits, sampling)
    chances = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    kept = set(np.flatnonzero(weights).tolist())
    expected = kept_slowly(logits, sampling)
    visible = set(np.flatnonzero(chances > 1e-37).tolist())  # float32 lets the least likely vanish
    # a cut that falls within rounding of a sum may fall on either side
    assert len((kept ^ expected) & visible) <= (top_p < 1)
    np.testing.assert_allclose(weights[sorted(kept)], chances[sorted(kept)], rtol=1e-4, atol=1e-37)
    assert sampler.draw(logits, sampling, seed % 1000) in kept


@pytest.mark.parametrize(
    "sampling", [params(), params(temperature=0.5), params(top_k=5), params(top_p=0.8), params(top_k=20, top_p=0.9)]
)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    """Chi-square over 10,000 seeds; the bound is passed by chance once in 10,000 times, and the seeds are fixed."""
    logits = np.linspace(2, -2, 600).astype(np.float32)[np.random.default_rng(0).permutation(600)]
    weights = np.zeros(600)
    kept = sorted(kept_slowly(logits, sampling))
    weights[kept] = np.exp(logits[kept].astype(np.float64) / sampling.temperature)
    draws = 10_000
    counts = np.bincount(
        [sampler.draw(logits, sampling.model_copy(update={"seed": seed}), seed % 7) for seed in range(draws)],
        minlength=600,
    )
    assert counts[weights == 0].sum() == 0
    expected = weights[kept] / weights.sum() * draws
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    degrees = len(kept) - 1
    assert abs(chi_square - degrees) < 3.9 * np.sqrt(2 * degrees)


def test_consecutive_indexes_are_independent() -> None:
    numbers = np.array([[sampler.uniform(seed, index) for index in range(50)] for seed in range(100)])
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.05
    assert abs(numbers.mean() - 0.5) < 0.02
    assert len(np.unique(numbers)) == numbers.size


def test_rounding_of_logits_does_not_change_draws() -> None:
    rng = np.random.default_rng(9)
    logits = rng.standard_normal(49_152).astype(np.float32) * 3
    changed = 0
    for seed in range(300):
        noisy = logits * (1 + rng.uniform(-1, 1, logits.shape).astype(np.float32) * 2e-7)
        sampling = params(seed=seed, top_p=0.95 if seed % 2 else 1.0)
        changed += sampler.draw(logits, sampling, seed) != sampler.draw(noisy, sampling, seed)
    assert changed == 0


def test_temperature_zero_takes_the_lowest_of_equals() -> None:
    logits = np.zeros(1000, np.float32)
    logits[[700, 300]] = 5
    assert sampler.draw(logits, params(temperature=0), 3) == 300
    assert sampler.greedy(logits[None]).tolist() == [300]


def test_equals_at_the_cut_are_kept_together() -> None:
    logits = np.array([1, 0, 0, 0, -5], np.float32)
    assert np.flatnonzero(sampler.filtered_weights(logits, params(top_k=2))).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 0.01])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = np.random.default_rng(4).standard_normal(5000).astype(np.float32) * 10
    assert sampler.draw(logits, params(temperature=temperature), 0) == int(logits.argmax())


def test_the_largest_uniform_number_hits_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, index: 1 - 2.0**-53)
    logits = np.full(1000, -50, np.float32)
    logits[[3, 600]] = 0
    assert sampler.draw(logits, params(top_k=2), 0) == 600


def test_not_a_number_is_seen_per_row() -> None:
    logits = np.zeros((4, 300), np.float32)
    logits[1, 299], logits[3, 0] = np.nan, np.inf
    assert sampler.finite(logits).tolist() == [True, False, True, False]
