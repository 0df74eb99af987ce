"""A token's logits are the same to the last bit whatever else is in the step, and however its prompt was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from .conftest import Driver, TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

Logits = dict[tuple[str, int], bytes]
SHAPE = {
    "hidden_size": 192,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 200,
    "num_layers": 2,
}
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 40, 64, 65, 100, 130, 199)
TOKENS = 6


def prompt(key: str) -> list[int]:
    return [(int(key) * 31 + 7 * i) % 97 for i in range(LENGTHS[int(key)])]


@pytest.fixture(params=["float16", "float32"])
def folder_and_dtype(tiny_folder: Callable[..., TinyFolder], request: pytest.FixtureRequest) -> tuple[TinyFolder, str]:
    """The dtype of weights, and of keys and values."""
    return tiny_folder(**SHAPE), request.param


@pytest.fixture
def compute(
    folder_and_dtype: tuple[TinyFolder, str], new_engine: Callable[..., Engine], drive: Callable[..., Driver]
) -> Callable[..., Logits]:
    """Runs the prompts of some keys together, and returns the bytes of every row of logits."""
    folder, dtype = folder_and_dtype

    def run(keys: list[str], output_ids: tuple[int, ...] = (), **limits: Any) -> Logits:
        engine = new_engine(folder, weight_dtype=dtype, kv_cache_dtype=dtype, **({"num_blocks": 200} | limits))
        seen: Logits = {}
        forward = engine._model.forward

        def recording(batch: Any) -> np.ndarray:
            logits = forward(batch)
            for chunk, row in zip(batch.sampling_chunks, logits, strict=True):
                seen[chunk.sequence.key, len(chunk.sequence.output_ids)] = row.tobytes()
            return logits

        engine._model.forward = recording  # type: ignore[method-assign]
        driver = drive(engine, reserve_tokens=TOKENS)
        for key in keys:
            driver.add(key, prompt(key), greedy(TOKENS, ignore_eos=True), output_ids=output_ids)
        run.answers = driver.run()  # type: ignore[attr-defined]
        engine.close()
        return seen

    return run


@pytest.fixture
def alone(compute: Callable[..., Logits]) -> Logits:
    seen: Logits = {}
    for number in range(len(LENGTHS)):
        seen |= compute([str(number)])
    assert len(seen) == len(LENGTHS) * TOKENS
    return seen


def test_in_any_company(compute: Callable[..., Logits], alone: Logits) -> None:
    everybody = [str(number) for number in range(len(LENGTHS))]
    assert compute(everybody) == alone
    assert compute(everybody, max_num_seqs=3, max_num_batched_tokens=7) == alone
    assert compute(everybody[::-1], max_num_seqs=14, max_num_batched_tokens=50) == alone
    assert compute(everybody, block_size_tokens=5, num_blocks=400, max_num_batched_tokens=33) == alone


def test_of_a_token_that_was_decoded_and_one_that_is_part_of_a_prompt(
    compute: Callable[..., Logits], alone: Logits
) -> None:
    key = str(len(LENGTHS) - 1)
    compute([key])
    answer = compute.answers[key]  # type: ignore[attr-defined]
    for done in range(1, TOKENS):
        resumed = compute([key], output_ids=tuple(answer[:done]), max_num_batched_tokens=64)
        assert resumed == {(key, index): alone[key, index] for index in range(done, TOKENS)}


def test_on_another_number_of_threads(
    compute: Callable[..., Logits], alone: Logits, threads: Callable[[int], None]
) -> None:
    everybody = [str(number) for number in range(len(LENGTHS))]
    for number in (2, 3):
        threads(number)
        assert compute(everybody) == alone


def test_on_processors_with_narrower_vectors(compute: Callable[..., Logits], alone: Logits, kernels: Path) -> None:
    from workers.engine.kernels.load import level, set_level

    best = level(kernels)
    if best != "avx512":
        pytest.skip("needs a processor with AVX-512")
    try:
        assert set_level(kernels, "avx2")
        assert compute([str(number) for number in range(len(LENGTHS))]) == alone
    finally:
        set_level(kernels, best)


@pytest.fixture
def threads(kernels: Path) -> Iterator[Callable[[int], None]]:
    from workers.engine.kernels.load import set_threads

    yield lambda number: set_threads(kernels, number)
    set_threads(kernels, 1)
