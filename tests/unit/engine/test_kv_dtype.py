"""Engines that keep keys and values in half precision: the same bits on every path, and no mixing with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from app.errors import PullError
from app.kv import KVReader, PullFailure

from .conftest import TINY, Driver, TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

TOKENS = 8
PROMPTS = {str(n): [(n * 31 + 7 * i) % 97 for i in range(n)] for n in (1, 15, 33, 70)}


@pytest.fixture
def pair(
    tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine]
) -> Iterator[Callable[[str, str], tuple[Engine, Engine]]]:
    """Makes two engines of one model by their KV dtypes."""
    made: list[Engine] = []

    def make(*dtypes: str) -> tuple[Engine, Engine]:
        folder = tiny_folder()
        for name, dtype in zip("pd", dtypes, strict=True):
            made.append(new_engine(folder, incarnation=name, num_blocks=40, kv_cache_dtype=dtype))
        return made[0], made[1]

    yield make
    for engine in made:
        engine.close()


def pull(reader: KVReader, source: Engine, blocks: list[int], target: Engine, into: list[int]) -> None:
    generations = [int(source.pool.generations[block]) for block in blocks]
    reader.pull(source.pool.location(), blocks, generations, source.pool.digest(blocks), target.pool, into)


def test_halves_take_half_the_bytes(pair: Callable[..., tuple[Engine, Engine]]) -> None:
    half, full = pair("float16", "float32")
    assert full.pool.block_bytes == TINY.num_layers * 2 * 16 * TINY.num_kv_heads * TINY.head_dim * 4
    assert half.pool.block_bytes * 2 == full.pool.block_bytes


def test_a_handoff_of_halves_is_exact_to_the_byte_and_the_answer_goes_on(
    pair: Callable[..., tuple[Engine, Engine]], drive: Callable[..., Driver], reader: KVReader
) -> None:
    prefill, decode = pair("float16", "float16")
    undisturbed = drive(prefill, reserve_tokens=TOKENS)
    for key, prompt in PROMPTS.items():
        undisturbed.add(key, prompt, greedy(TOKENS, ignore_eos=True))
    expected = undisturbed.run()
    first, rest = drive(prefill, reserve_tokens=0), drive(decode, reserve_tokens=TOKENS)
    for key, prompt in PROMPTS.items():
        first.add(key, prompt, greedy(TOKENS, ignore_eos=True), one_token=True)
    tokens = first.run()
    for key, prompt in PROMPTS.items():
        source = first.blocks[key]
        target = rest.allocate(key, len(prompt) + TOKENS)[: len(source)]
        pull(reader, prefill, source, decode, target)
        assert decode.pool.blocks[target].tobytes() == prefill.pool.blocks[source].tobytes()
        assert decode.pool.blocks[target].any()
        options: dict[str, Any] = {"output_ids": tuple(tokens[key]), "num_computed": len(prompt)}
        rest.add(key, prompt, greedy(TOKENS, ignore_eos=True), **options)
    for key, more in rest.run().items():
        assert tokens[key] + more == expected[key]


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16")])
def test_nodes_with_other_dtypes_refuse_each_other_and_say_why(
    dtypes: tuple[str, str], pair: Callable[..., tuple[Engine, Engine]], reader: KVReader
) -> None:
    prefill, decode = pair(*dtypes)
    assert prefill.layout == decode.layout.replace(f"dtype={dtypes[1]}", f"dtype={dtypes[0]}")
    before = decode.pool.blocks.tobytes()
    with pytest.raises(PullError, match=f"dtype={dtypes[0]} .* does not fit .*dtype={dtypes[1]} ") as refused:
        pull(reader, prefill, [1], decode, [2])
    assert refused.value.reason is PullFailure.LAYOUT
    assert decode.pool.blocks.tobytes() == before
