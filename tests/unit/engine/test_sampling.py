"""All that happens between logits and a token, against one slow, separate implementation in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import EngineError
from app.logprobs import TokenLogprobs
from app.schemas import SamplingParams
from workers.engine import chances, sampler
from workers.engine.biases import add_biases, ban
from workers.engine.penalties import apply_penalties
from workers.engine.sequence import Sequence

from .conftest import Driver, TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

VOCAB = 40
EOS = (38, 39)
TOKENS = st.integers(0, VOCAB - 1)
SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.8, 1.0, 2.0]),
        "top_p": st.sampled_from([0.05, 0.5, 0.93, 1.0, 1.0]),
        "top_k": st.sampled_from([0, 0, 1, 5, 39, 1000]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.2, -0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.6]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -2.5, 0.25, 4.0, 100.0]), max_size=4).map(
            lambda biases: tuple(biases.items())
        ),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(TOKENS, max_size=3, unique=True).map(tuple),
        "ignore_eos": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


def sequence(prompt: list[int], output: list[int], **changes: Any) -> Sequence:
    sampling = SamplingParams(**({"max_tokens": 100, "seed": 1} | changes))
    return Sequence("x", list(prompt), list(output), sampling, [0], 0, one_token=False, eos_token_ids=EOS)


def shaped(logits: np.ndarray, batch: list[Sequence]) -> np.ndarray:
    after = logits.copy()
    add_biases(after, batch)
    apply_penalties(after, batch)
    ban(after, batch)
    return after


def chances_slowly(logits: np.ndarray, each: Sequence) -> tuple[list[float], set[int]]:
    """The chance of each token, one token after the other; and which tokens lie so near a cut that rounding decides."""
    sampling, prompt, output = each.sampling, each.prompt_ids, each.output_ids
    scores = [float(logit) for logit in logits]
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in range(len(scores)):
        if token in prompt or token in output:
            r = sampling.repetition_penalty
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
        scores[token] -= sampling.frequency_penalty * output.count(token)
        scores[token] -= sampling.presence_penalty * (token in output)
    if len(output) < sampling.min_tokens:
        for token in (*EOS, *sampling.stop_token_ids):
            scores[token] = -math.inf
    top = max(scores)
    weights = [math.exp((score - top) / sampling.temperature) for score in scores]
    unsure = {t for t, w in enumerate(weights) if w < 1 and abs(w - sampling.min_p) < 1e-6 * sampling.min_p}
    weights = [w if w >= sampling.min_p else 0.0 for w in weights]
    if sampling.top_k:
        ordered = sorted(weights, reverse=True)
        kth = ordered[min(sampling.top_k, len(ordered)) - 1]
        unsure |= {t for t, w in enumerate(weights) if w != kth and abs(w - kth) < 1e-6 * kth}
        weights = [w if w >= kth else 0.0 for w in weights]
    if sampling.top_p < 1:
        total, reached, floor = sum(weights), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            if reached < sampling.top_p * total:
                floor = weight
            elif abs(reached - sampling.top_p * total) < 1e-5 * total:
                unsure |= {t for t, w in enumerate(weights) if abs(w - weight) < 1e-6 * weight}
            if abs(reached - sampling.top_p * total) < 1e-5 * total:
                unsure |= {t for t, w in enumerate(weights) if abs(w - floor) < 1e-6 * floor}
            reached += weight
        weights = [w if w >= floor * (1 - 1e-6) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights], unsure


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(TOKENS, min_size=1, max_size=8), st.lists(TOKENS, max_size=8), SAMPLING),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**32),
)
def test_chances_are_those_of_the_slow_way(rows: list[tuple[Any, Any, Any]], seed: int) -> None:
    batch = [sequence(prompt, output, **options) for prompt, output, options in rows]
    logits = (np.random.default_rng(seed).standard_normal((len(batch), VOCAB)) * 3).astype(np.float32)
    after = shaped(logits, batch)
    for each, before, row in zip(batch, logits, after, strict=True):
        expected, unsure = chances_slowly(before, each)
        weights = sampler.filtered_weights(row, each.sampling).astype(np.float64)
        if unsure:
            continue
        np.testing.assert_allclose(weights / weights.sum(), expected, rtol=2e-4, atol=1e-30)
        assert expected[sampler.draw(row, each.sampling, len(each.output_ids))] > 0


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(TOKENS, min_size=1, max_size=8), st.lists(TOKENS, max_size=8), SAMPLING),
        min_size=2,
        max_size=6,
    ),
    seed=st.integers(0, 2**32),
    num_top=st.integers(0, 20),
)
def test_what_else_is_in_a_batch_changes_no_bit(rows: list[tuple[Any, Any, Any]], seed: int, num_top: int) -> None:
    batch = [sequence(prompt, output, **options, logprobs=num_top) for prompt, output, options in rows]
    logits = (np.random.default_rng(seed).standard_normal((len(batch), VOCAB)) * 3).astype(np.float32)
    kept = chances.keep(logits, batch)
    together = shaped(logits, batch)
    for row, each in enumerate(batch):
        alone = shaped(logits[row : row + 1], [each])
        assert together[row].tobytes() == alone[0].tobytes()
        index = len(each.output_ids)
        token = sampler.draw(together[row], each.sampling, index)
        assert token == sampler.draw(alone[0], each.sampling, index)
        told = chances.token_logprobs(kept[row], token, num_top)
        assert told == chances.token_logprobs(logits[row : row + 1][0].copy(), token, num_top)


@settings(max_examples=200, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 19, 20, 21, 300]),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.5, 20.0]),
    num_top=st.integers(0, 20),
)
def test_logprobs_are_log_softmax_and_the_likeliest_come_first(
    vocab: int, seed: int, scale: float, num_top: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal(vocab) * scale, 1).astype(np.float32)  # with equals
    token = int(rng.integers(vocab))
    total = math.fsum(math.exp(float(x) - float(logits.max())) for x in logits)
    expected = [float(x) - float(logits.max()) - math.log(total) for x in logits]
    told = chances.token_logprobs(logits, token, num_top)
    assert told.own == pytest.approx(expected[token], abs=1e-9)
    ranked = sorted(range(vocab), key=lambda i: (-logits[i], i))[:num_top]
    assert [i for i, _ in told.top] == ranked
    assert [p for _, p in told.top] == pytest.approx([expected[i] for i in ranked], abs=1e-9)


def test_nothing_is_touched_where_nobody_asks() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits.flags.writeable = False
    batch = [sequence([1], [2]), sequence([1], [2], min_tokens=1)]  # its minimum is reached
    add_biases(logits, batch)
    ban(logits, batch)
    assert chances.keep(logits, batch) == {}


def test_min_tokens_bans_up_to_its_length_and_with_ignore_eos_too() -> None:
    each = sequence([1], [], min_tokens=2, stop_token_ids=(5,), ignore_eos=True)
    for expected in ([5, *EOS], [5, *EOS], []):
        logits = np.zeros((1, VOCAB), np.float32)
        ban(logits, [each])
        assert np.flatnonzero(logits[0] == -np.inf).tolist() == expected
        each.append(0)
    resumed = sequence([1], [0], min_tokens=2)
    assert resumed.banned is not None
    assert sequence([1], [0, 0], min_tokens=2).banned is None


@pytest.fixture
def engine(tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine]) -> Any:
    made = new_engine(tiny_folder(eos_token_ids=(90,)), num_blocks=64, max_num_seqs=8, max_num_batched_tokens=50)
    yield made
    made.close()


def test_an_engine_tells_logprobs_of_the_models_own_distribution(
    engine: Engine, drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw: dict[tuple[str, int], np.ndarray] = {}
    forward = engine._model.forward

    def recording(batch: Any) -> np.ndarray:
        logits = forward(batch)
        for chunk, row in zip(batch.sampling_chunks, logits, strict=True):
            raw[chunk.sequence.key, len(chunk.sequence.output_ids)] = row.astype(np.float64)
        return logits

    monkeypatch.setattr(engine._model, "forward", recording)
    driver = drive(engine)
    changed = {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "repetition_penalty": 1.5, "logit_bias": ((3, 6.0),)}
    driver.add("changed", [5, 6, 7], greedy(12, logprobs=4, min_tokens=12, **changed))
    driver.add("plain", list(range(60)), greedy(12, logprobs=0))
    driver.add("none", [5, 6, 7], greedy(12))
    answers = driver.run()
    assert all(output.logprobs == "" for output in driver.outputs["none"])
    assert 3 in answers["changed"]
    for key, num_top in (("changed", 4), ("plain", 0)):
        for index, output in enumerate(driver.outputs[key]):
            logits = raw[key, index]
            expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            told = TokenLogprobs.unpack(output.logprobs)
            assert told.own == pytest.approx(expected[output.token_id], abs=1e-5)
            assert [token for token, _ in told.top] == np.argsort(-logits, kind="stable")[:num_top].tolist()
            assert [p for _, p in told.top] == pytest.approx(np.sort(expected)[::-1][:num_top], abs=1e-5)


def test_an_answer_ends_at_a_stop_token_and_not_before_min_tokens(engine: Engine, drive: Callable[..., Driver]) -> None:
    driver = drive(engine)
    driver.add("free", [4, 5, 6], greedy(30))
    free = driver.run()["free"]
    first = next(i for i, token in enumerate(free) if token not in free[:i] and i > 3)
    stopping = drive(engine)
    stopping.add("stop", [4, 5, 6], greedy(30, stop_token_ids=(free[first], 96)))
    stopping.add("later", [4, 5, 6], greedy(30, stop_token_ids=(free[first], 96), min_tokens=first + 3))
    stopping.add("ignore", [4, 5, 6], greedy(30, stop_token_ids=(free[first],), ignore_eos=True))
    answers = stopping.run()
    assert answers["stop"] == answers["ignore"] == free[: first + 1]
    assert stopping.outputs["stop"][-1].finish_reason == "stop"
    assert len(answers["later"]) >= first + 3
    assert free[first] not in answers["later"][: first + 3]


def test_a_bias_forces_and_forbids(engine: Engine, drive: Callable[..., Driver]) -> None:
    driver = drive(engine)
    driver.add("forced", [5, 6, 7], greedy(8, logit_bias=((41, 100.0),)))
    driver.add("eos", [5, 6, 7], greedy(8, logit_bias=((90, 100.0),), min_tokens=3))
    answers = driver.run()
    assert answers["forced"] == [41] * 8
    assert len(answers["eos"]) == 4
    assert answers["eos"][3] == 90


def test_a_token_outside_the_vocabulary_is_refused_and_so_is_a_ban_of_all(
    engine: Engine, drive: Callable[..., Driver]
) -> None:
    driver = drive(engine)
    for wrong in ({"logit_bias": ((97, 1.0),)}, {"stop_token_ids": (97,)}):
        with pytest.raises(EngineError, match="vocabulary of 97"):
            driver.add("wrong", [5], greedy(4, **wrong))
    driver.add("all", [5], greedy(4, stop_token_ids=tuple(range(97)), min_tokens=2))
    driver.add("other", [5], greedy(4))
    answers = driver.run()
    assert "every token" in str(driver.outputs["all"][0].error)
    assert len(answers["other"]) == 4
