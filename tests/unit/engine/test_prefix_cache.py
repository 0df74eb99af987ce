"""Sequences that start in blocks which others have computed: the reference's tokens, from every block on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from app.model.folder import ModelFolder

from .conftest import Driver, TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

Cases = list[dict[str, Any]]
Drive = Callable[..., Driver]
BLOCK_TOKENS = 4
TOKENS = 10


@pytest.fixture(scope="module")
def small_blocks(default_folder: ModelFolder, new_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """The default model with blocks of four tokens, so that a prompt has many places to start from."""
    engine = new_engine(default_folder, block_size_tokens=BLOCK_TOKENS, num_blocks=512, max_num_seqs=64)
    yield engine
    engine.close()


def from_every_block(engine: Engine, driver: Driver, key: str, prompt: list[int]) -> list[str]:
    """Add ``prompt`` once for each number of blocks that can be taken over from the sequence ``key``."""
    size = engine.block_size_tokens
    added = []
    for known in range((len(prompt) - 1) // size + 1):
        name = f"{key} after {known}"
        own = driver.allocate(name, len(prompt) + TOKENS - known * size)
        driver.blocks[name] = [*driver.blocks[key][:known], *own]
        driver.add(name, prompt, greedy(TOKENS), num_computed=known * size)
        added.append(name)
    return added


@pytest.mark.model
def test_cold_warm_and_from_every_block_on_the_references_come_back(
    small_blocks: Engine, cases: Cases, drive: Drive
) -> None:
    for case in cases:
        prompt, expected = case["prompt_ids"], case["output_ids"][:TOKENS]
        driver = drive(small_blocks, reserve_tokens=0)
        driver.add("cold", prompt, greedy(TOKENS), one_token=True)
        assert driver.run()["cold"] == expected[:1]
        full = driver.blocks["cold"][: len(prompt) // BLOCK_TOKENS]
        before = small_blocks.pool.blocks[full].copy()
        warm = from_every_block(small_blocks, driver, "cold", prompt)
        tokens = driver.run()  # all of them in one batch, in blocks that they share
        assert [tokens[name] for name in warm] == [expected] * len(warm)
        assert (small_blocks.pool.blocks[full] == before).all(), "nobody writes to what is shared"


@pytest.mark.model
def test_after_the_beginning_of_another_prompt_the_reference_comes_back(
    small_blocks: Engine, cases: Cases, drive: Drive
) -> None:
    """A prompt that has only its beginning in common with what was computed, at every block."""
    case = max(cases, key=lambda case: len(case["prompt_ids"]))
    prompt, expected = case["prompt_ids"], case["output_ids"][:TOKENS]
    driver = drive(small_blocks, reserve_tokens=0)
    names = []
    for known in range(1, (len(prompt) - 1) // BLOCK_TOKENS + 1):
        begun = f"begun {known}"
        driver.add(begun, [*prompt[: known * BLOCK_TOKENS], 17, 19, 23], greedy(TOKENS), one_token=True)
        driver.run()
        name = f"after {known}"
        own = driver.allocate(name, len(prompt) + TOKENS - known * BLOCK_TOKENS)
        driver.blocks[name] = [*driver.blocks[begun][:known], *own]
        driver.add(name, prompt, greedy(TOKENS), num_computed=known * BLOCK_TOKENS)
        names.append(name)
    tokens = driver.run()
    assert [tokens[name] for name in names] == [expected] * len(names)


@pytest.mark.parametrize("budget", [512, 5])
def test_in_chunks_and_at_once_a_tiny_model_draws_the_same_from_every_block_on(
    tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine], drive: Drive, budget: int
) -> None:
    engine = new_engine(
        tiny_folder(), block_size_tokens=BLOCK_TOKENS, num_blocks=256, max_num_seqs=5, max_num_batched_tokens=budget
    )
    prompt = [(7 * place) % 97 for place in range(38)]
    driver = drive(engine, reserve_tokens=TOKENS)
    driver.add("cold", prompt, greedy(TOKENS))
    expected = driver.run()["cold"]
    names = from_every_block(engine, driver, "cold", prompt)
    tokens = driver.run()
    assert [tokens[name] for name in names] == [expected] * len(names)
    engine.close()


def test_partly_hit_at_every_offset_a_tiny_model_computes_the_same_logits_to_the_last_bit(
    tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine], drive: Drive
) -> None:
    """Another prompt has its first ``offset`` tokens in common: full blocks of them are taken over."""
    engine = new_engine(tiny_folder(), block_size_tokens=BLOCK_TOKENS, num_blocks=256, max_num_seqs=5)
    seen: dict[tuple[str, int], bytes] = {}
    forward = engine._model.forward

    def recording(batch: Any) -> Any:
        logits = forward(batch)
        for chunk, row in zip(batch.sampling_chunks, logits, strict=True):
            seen[chunk.sequence.key, len(chunk.sequence.output_ids)] = row.tobytes()
        return logits

    engine._model.forward = recording  # type: ignore[method-assign]
    prompt = [(7 * place) % 97 for place in range(3 * BLOCK_TOKENS + 2)]
    driver = drive(engine, reserve_tokens=3)
    driver.add("cold", prompt, greedy(3))
    expected = driver.run()["cold"]
    for offset in range(len(prompt) + 1):
        begun, name = f"begun {offset}", f"after {offset}"
        driver.add(begun, [*prompt[:offset], 17, 19, 23], greedy(1), one_token=True)
        driver.run()
        known = min(offset, len(prompt) - 1) // BLOCK_TOKENS
        own = driver.allocate(name, len(prompt) + 3 - known * BLOCK_TOKENS)
        driver.blocks[name] = [*driver.blocks[begun][:known], *own]
        driver.add(name, prompt, greedy(3), num_computed=known * BLOCK_TOKENS)
        assert driver.run()[name] == expected
        assert [seen[name, index] for index in range(3)] == [seen["cold", index] for index in range(3)], offset
    engine.close()
