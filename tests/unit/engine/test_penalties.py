"""Penalties against slow, separate implementations, and in an engine's answers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.schemas import SamplingParams
from workers.engine import sampler
from workers.engine.penalties import apply_penalties
from workers.engine.sequence import Sequence

from .conftest import Driver, TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

PENALTIES = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.6, -2.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.1, -0.7, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    }
)


def sequence(prompt_ids: Sequence_[int], output_ids: Sequence_[int], **changes: Any) -> Sequence:
    return Sequence("x", list(prompt_ids), list(output_ids), greedy(**changes), [0], 0, one_token=False)


def penalised_slowly(logits: np.ndarray, prompt: list[int], output: list[int], sampling: SamplingParams) -> np.ndarray:
    """One token of the vocabulary after the other, in float64."""
    changed = logits.astype(np.float64)
    for token in range(len(logits)):
        if token in prompt or token in output:
            r = sampling.repetition_penalty
            changed[token] = changed[token] / r if changed[token] > 0 else changed[token] * r
        changed[token] -= sampling.frequency_penalty * output.count(token)
        changed[token] -= sampling.presence_penalty if token in output else 0
    return changed


@settings(max_examples=150, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 60), rows=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_a_batch_is_penalised_as_row_by_row_and_token_by_token(
    data: st.DataObject, vocab: int, rows: int, seed: int
) -> None:
    ids = st.lists(st.integers(0, vocab - 1), max_size=25)
    batch = [sequence(data.draw(ids), data.draw(ids), **data.draw(PENALTIES)) for _ in range(rows)]
    before = (np.random.default_rng(seed).standard_normal((rows, vocab)) * 8).astype(np.float32)
    after = before.copy()
    apply_penalties(after, batch)
    for each, old, new in zip(batch, before, after, strict=True):
        expected = penalised_slowly(old, each.prompt_ids, each.output_ids, each.sampling)
        np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-5)
        untouched = [t for t in range(vocab) if t not in each.token_ids]
        assert (new[untouched] == old[untouched]).all()


@pytest.mark.parametrize("penalty", [0.8, 1.2, 3.0])
def test_repetition_is_what_transformers_documents(penalty: float) -> None:
    """RepetitionPenaltyLogitsProcessor: gather at input_ids (prompt and answer, doubles too), where, scatter."""
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((3, 500)).astype(np.float32) * 5
    input_ids = rng.integers(0, 500, (3, 300))
    score = np.take_along_axis(scores, input_ids, axis=1)
    score = np.where(score < 0, score * np.float32(penalty), score / np.float32(penalty))
    expected = scores.copy()
    np.put_along_axis(expected, input_ids, score, axis=1)
    cuts = (0, 120, 300)
    batch = [
        sequence(ids[:cut], ids[cut:], repetition_penalty=penalty) for ids, cut in zip(input_ids, cuts, strict=True)
    ]
    apply_penalties(scores, batch)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 19), max_size=10),
    output=st.lists(st.integers(0, 19), min_size=1, max_size=30),
    penalties=PENALTIES,
    data=st.data(),
)
def test_where_an_attempt_began_changes_no_bit(
    prompt: list[int], output: list[int], penalties: dict[str, float], data: st.DataObject
) -> None:
    logits = np.random.default_rng(len(output)).standard_normal((1, 20)).astype(np.float32)
    undisturbed, resumed = logits.copy(), logits.copy()
    first = sequence(prompt, [], **penalties)
    second = sequence(prompt, output[: data.draw(st.integers(0, len(output)))], **penalties)
    for each, after in ((first, undisturbed), (second, resumed)):
        for token in output[len(each.output_ids) :]:
            each.append(token)
        apply_penalties(after, [each])
    assert undisturbed.tobytes() == resumed.tobytes()


def test_logits_are_not_touched_where_nobody_has_a_penalty() -> None:
    logits = np.zeros((2, 9), np.float32)
    logits.flags.writeable = False
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    apply_penalties(logits, [sequence([1], [2]), sequence([1], [2], **neutral)])


@pytest.mark.parametrize("repetition", [5e-324, 1e-300, 1e-20, 1e20, 1.7e308])
@pytest.mark.parametrize("temperature", [0, 1e-5, 1.0])
def test_no_penalty_makes_an_infinity(repetition: float, temperature: float) -> None:
    logits = np.linspace(-30, 30, 50, dtype=np.float32)[None].copy()
    each = sequence(range(20), range(10, 40), repetition_penalty=repetition, frequency_penalty=2)
    apply_penalties(logits, [each])
    assert np.isfinite(logits).all()
    chosen = sampler.draw(logits[0], greedy(temperature=temperature), 3)
    assert chosen in (range(40, 50) if repetition > 1 else range(25, 40))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.01),
        ("presence_penalty", -2.01),
        ("frequency_penalty", 2.01),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", float("inf")),
    ],
)
def test_penalties_have_limits(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        greedy(**{field: value})


def test_an_engine_takes_the_likeliest_after_penalties_for_each_of_its_sequences(
    tiny_folder: Callable[..., TinyFolder],
    new_engine: Callable[..., Engine],
    drive: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine(tiny_folder(), num_blocks=64, max_num_seqs=4, max_num_batched_tokens=50)
    raw: dict[tuple[str, int], np.ndarray] = {}
    forward = engine._model.forward

    def recording(batch: Any) -> np.ndarray:
        logits = forward(batch)
        for chunk, row in zip(batch.sampling_chunks, logits, strict=True):
            raw[chunk.sequence.key, len(chunk.sequence.output_ids)] = row.copy()
        return logits

    monkeypatch.setattr(engine._model, "forward", recording)
    prompts = {"long": [n % 13 for n in range(70)], "short": [4, 4, 5], "plain": [4, 4, 5], "middle": list(range(20))}
    samplings = {
        "long": greedy(20, repetition_penalty=1.8),
        "short": greedy(16, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.1),
        "plain": greedy(20),
        "middle": greedy(18, frequency_penalty=-0.8),
    }
    driver = drive(engine)
    for key, prompt in prompts.items():
        driver.add(key, prompt, samplings[key])
    answers = driver.run()
    assert answers["short"] != answers["plain"][:16]
    for (key, index), logits in raw.items():
        expected = penalised_slowly(logits, prompts[key], answers[key][:index], samplings[key])
        assert answers[key][index] == int(np.argmax(expected.astype(np.float32)))
    engine.close()
