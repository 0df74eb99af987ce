"""The tokens of another implementation, on every path a sequence can take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.kv import KVReader
from app.model.folder import ModelFolder

from .conftest import REFERENCES, Driver, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

pytestmark = pytest.mark.model
Drive = Callable[..., Driver]
Cases = list[dict[str, Any]]


def expected(cases: Cases) -> dict[str, list[int]]:
    return {str(number): case["output_ids"] for number, case in enumerate(cases)}


def test_each_prompt_alone(engine: Engine, cases: Cases, drive: Drive) -> None:
    tokens = 12
    driver = drive(engine, reserve_tokens=tokens)
    for number, case in enumerate(cases):
        driver.add(str(number), case["prompt_ids"], greedy(tokens))
        driver.run()
    assert driver.run() == {key: ids[:tokens] for key, ids in expected(cases).items()}


def test_all_prompts_in_one_batch(engine: Engine, cases: Cases, drive: Drive) -> None:
    driver = drive(engine)
    for number, case in enumerate(cases):
        driver.add(str(number), case["prompt_ids"], greedy())
    assert driver.run() == expected(cases)
    finishes = [driver.outputs[str(number)][-1].finish_reason for number in range(len(cases))]
    assert finishes == [case["finish"] for case in cases]
    for outputs in driver.outputs.values():
        assert [output.index for output in outputs] == list(range(len(outputs)))
        assert all(output.finish_reason is None and output.error is None for output in outputs[:-1])


def test_prompts_in_chunks_of_seven(narrow_engine: Engine, cases: Cases, drive: Drive) -> None:
    tokens = 10
    driver = drive(narrow_engine, reserve_tokens=tokens)
    for number, case in enumerate(cases):
        driver.add(str(number), case["prompt_ids"], greedy(tokens))
    assert (narrow_engine.num_running, narrow_engine.num_waiting) == (4, len(cases) - 4)
    assert driver.run() == {key: ids[:tokens] for key, ids in expected(cases).items()}


def test_a_handoff_goes_on_with_the_same_tokens(
    engine: Engine, narrow_engine: Engine, cases: Cases, drive: Drive, reader: KVReader
) -> None:
    tokens = 20
    prefill, decode = drive(engine, reserve_tokens=0), drive(narrow_engine, reserve_tokens=tokens)
    for number, case in enumerate(cases):
        prefill.add(str(number), case["prompt_ids"], greedy(tokens), one_token=True)
    first = prefill.run()
    assert not engine.keys()
    for number, case in enumerate(cases):
        key, prompt = str(number), case["prompt_ids"]
        source = prefill.blocks[key]
        engine.export(source)
        target = decode.allocate(key, len(prompt) + tokens)
        generations = [int(generation) for generation in engine.pool.generations[source]]
        digests = engine.pool.digest(source)
        reader.pull(engine.pool.location(), source, generations, digests, narrow_engine.pool, target[: len(source)])
        narrow_engine.import_(target[: len(source)])
        decode.add(key, prompt, greedy(tokens), output_ids=tuple(first[key]), num_computed=len(prompt))
    rest = decode.run()
    assert {key: first[key] + rest[key] for key in rest} == {key: ids[:tokens] for key, ids in expected(cases).items()}


def test_a_resumed_answer_goes_on_with_the_same_tokens(engine: Engine, cases: Cases, drive: Drive) -> None:
    driver, tokens, done = drive(engine, reserve_tokens=24), 24, 9
    long_enough = {str(n): case for n, case in enumerate(cases) if len(case["output_ids"]) > done}
    for key, case in long_enough.items():
        driver.add(key, case["prompt_ids"], greedy(tokens), output_ids=tuple(case["output_ids"][:done]))
    assert driver.run() == {key: case["output_ids"][done:tokens] for key, case in long_enough.items()}
    assert all(outputs[0].index == done for outputs in driver.outputs.values())


def test_long_prompts(engine: Engine, drive: Drive) -> None:
    cases = json.loads((REFERENCES / "long_reference.json").read_text())
    tokens, found = 8, []
    for case in cases:
        driver = drive(engine, reserve_tokens=tokens)
        driver.add("long", case["prompt_ids"], greedy(tokens))
        found += driver.run().values()
    assert max(len(case["prompt_ids"]) for case in cases) >= 2000
    assert found == [case["output_ids"][:tokens] for case in cases]


CLEAR_MARGIN = 0.02
"""By how much each token of a reference must win, so that rounding weights, keys and values to float16 changes none."""


@pytest.fixture
def clear(cases: Cases) -> dict[str, dict[str, Any]]:
    found = {str(number): case for number, case in enumerate(cases) if case["min_margin"] >= CLEAR_MARGIN}
    assert len(found) > 5
    return found


@pytest.fixture(params=["compiled", "compiled, half KV", "pure Paddle, half KV"])
def half_engine(
    default_folder: ModelFolder, new_engine: Callable[..., Engine], kernels: Path, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """The default model as it is served: weights in float16; and with keys and values in float16 too."""
    made = new_engine(
        default_folder,
        num_blocks=96,
        weight_dtype="float16",
        kernels=kernels if "compiled" in request.param else None,
        kv_cache_dtype="float16" if "half KV" in request.param else "float32",
    )
    yield made
    made.close()


def test_half_precision_changes_no_clear_choice(
    half_engine: Engine, clear: dict[str, dict[str, Any]], drive: Drive
) -> None:
    driver = drive(half_engine)
    for key, case in clear.items():
        driver.add(key, case["prompt_ids"], greedy())
    assert driver.run() == {key: case["output_ids"] for key, case in clear.items()}


def test_keys_and_values_in_half_precision_change_no_clear_choice_of_a_prompt_alone(
    default_folder: ModelFolder, new_engine: Callable[..., Engine], clear: dict[str, dict[str, Any]], drive: Drive
) -> None:
    engine, tokens = new_engine(default_folder, num_blocks=96, kv_cache_dtype="float16"), 10
    driver = drive(engine, reserve_tokens=tokens)
    for key, case in clear.items():
        driver.add(key, case["prompt_ids"], greedy(tokens))
        driver.run()
    assert driver.run() == {key: case["output_ids"][:tokens] for key, case in clear.items()}
    engine.close()


def test_pure_paddle_has_the_same_tokens(
    default_folder: ModelFolder, new_engine: Callable[..., Engine], cases: Cases, drive: Drive
) -> None:
    engine = new_engine(default_folder, num_blocks=96, kernels=None, max_num_batched_tokens=40)
    driver = drive(engine)
    for number, case in enumerate(cases):
        driver.add(str(number), case["prompt_ids"], greedy())
    assert driver.run() == expected(cases)
    engine.close()
