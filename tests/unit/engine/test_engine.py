"""Ends, refusals and faults of sequences in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from app.errors import EngineError, StartupError
from app.model.folder import ModelFolder

from .conftest import Driver, TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

Drive = Callable[..., Driver]
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture
def tiny(tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine]) -> Iterator[Engine]:
    made = new_engine(tiny_folder(), num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100)
    yield made
    made.close()


def answer(engine: Engine, drive: Drive, max_tokens: int = 12, **changes: Any) -> list[int]:
    """What the engine answers to PROMPT with nothing else going on."""
    driver = drive(engine)
    driver.add("alone", PROMPT, greedy(max_tokens, **changes))
    return driver.run()["alone"]


# How answers end


def test_eos_ends_an_answer_and_is_part_of_it(
    tiny: Engine, drive: Drive, tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine]
) -> None:
    tokens = answer(tiny, drive)
    eos = tokens[4]
    end = tokens.index(eos) + 1
    stopping = new_engine(tiny_folder(eos_token_ids=(96, eos)), num_blocks=64)
    driver = drive(stopping)
    driver.add("stops", PROMPT, greedy(12))
    driver.add("goes on", PROMPT, greedy(12, ignore_eos=True))
    driver.add("resumed", PROMPT, greedy(12), output_ids=tuple(tokens[: end - 1]), one_token=True)
    found = driver.run()
    assert found == {"stops": tokens[:end], "goes on": tokens, "resumed": [eos]}
    assert {key: outputs[-1].finish_reason for key, outputs in driver.outputs.items()} == {
        "stops": "stop",
        "goes on": "length",
        "resumed": "stop",
    }
    stopping.close()


def test_the_first_token_may_end_the_answer(tiny: Engine, drive: Drive) -> None:
    driver = drive(tiny)
    driver.add("one", PROMPT, greedy(1))
    driver.add("handed on", PROMPT, greedy(2), one_token=True)
    driver.run()
    assert [(o.index, o.finish_reason) for o in driver.outputs["one"]] == [(0, "length")]
    assert [(o.index, o.finish_reason) for o in driver.outputs["handed on"]] == [(0, None)]
    assert tiny.keys() == []


def test_max_model_len_ends_an_answer(tiny: Engine, drive: Drive) -> None:
    driver = drive(tiny, reserve_tokens=100)
    driver.add("long", PROMPT, greedy(1000))
    assert len(driver.run()["long"]) == 100 - len(PROMPT)
    assert driver.outputs["long"][-1].finish_reason == "length"


@pytest.mark.model
def test_a_stop_string_across_tokens_ends_an_answer(
    engine: Engine, default_folder: ModelFolder, cases: list[dict[str, Any]], drive: Drive
) -> None:
    ids, tokenizer = cases[0]["output_ids"], default_folder.tokenizer()
    text = tokenizer.decode(ids)
    stop = text[8:14]
    assert stop not in tokenizer.decode(ids[:1])
    end = next(n for n in range(1, len(ids)) if stop in tokenizer.decode(ids[:n]))
    driver = drive(engine)
    driver.add("whole", cases[0]["prompt_ids"], greedy(stop=("never there", stop)))
    driver.add("resumed", cases[0]["prompt_ids"], greedy(stop=(stop,)), output_ids=tuple(ids[: end - 1]))
    assert driver.run() == {"whole": ids[:end], "resumed": ids[end - 1 : end]}
    assert all(outputs[-1].finish_reason == "stop" for outputs in driver.outputs.values())


# Sampling


def test_a_seeded_answer_is_the_same_alone_beside_others_and_resumed(tiny: Engine, drive: Drive) -> None:
    sampling = greedy(30, temperature=0.9, top_p=0.95, seed=77)
    alone = drive(tiny)
    alone.add("x", PROMPT, sampling)
    tokens = alone.run()["x"]
    beside = drive(tiny)
    for number in range(5):
        beside.add(f"other-{number}", [number + 20] * (3 + 9 * number), greedy(30, temperature=1.0, seed=number))
    beside.add("x", PROMPT, sampling)
    assert beside.run()["x"] == tokens
    for done in (1, 13, 29):
        resumed = drive(tiny)
        resumed.add("x", PROMPT, sampling, output_ids=tuple(tokens[:done]))
        assert resumed.run()["x"] == tokens[done:]
    other_seed = drive(tiny)
    other_seed.add("x", PROMPT, sampling.model_copy(update={"seed": 78}))
    assert other_seed.run()["x"] != tokens


# Blocks


def test_a_step_writes_to_the_blocks_of_its_sequences_only(tiny: Engine, drive: Drive) -> None:
    tiny.pool.blocks[:] = 77
    driver = drive(tiny)
    for key, length in (("a", 30), ("b", 5), ("c", 17)):
        driver.add(key, [9] * length, greedy(6))
    heard: list[str] = []
    tiny.step(heard.extend)
    assert heard == ["a", "b", "c"]
    driver.run()
    own = [block for blocks in driver.blocks.values() for block in blocks]
    others = [block for block in range(tiny.pool.num_blocks) if block not in own]
    assert (tiny.pool.blocks[others] == 77).all()


def test_after_stop_nothing_is_written_any_more(tiny: Engine, drive: Drive) -> None:
    driver = drive(tiny)
    driver.add("stays", PROMPT, greedy(20))
    driver.add("prefilling", [9] * 90, greedy(20))
    tiny.step()
    assert tiny._sequences["prefilling"].num_computed == 64 - len(PROMPT)
    tiny.stop("prefilling")
    assert "prefilling" not in tiny
    tiny.pool.blocks[driver.blocks["prefilling"]] = 77
    driver.run()
    assert (tiny.pool.blocks[driver.blocks["prefilling"]] == 77).all()
    assert "prefilling" not in driver.outputs


def test_a_sequence_waits_for_blocks_and_goes_on_with_more(tiny: Engine, drive: Drive) -> None:
    expected = answer(tiny, drive, 40)
    driver = drive(tiny, reserve_tokens=0)
    driver.add("grows", PROMPT, greedy(40))
    first = list(driver.run()["grows"])
    assert first == expected[: 16 - len(PROMPT) + 1]
    assert not tiny.has_work
    assert tiny.step() == []
    tiny.extend("grows", [b for b in range(64) if b not in driver.blocks["grows"]][:2])
    assert driver.run()["grows"] == expected


# Faults of one sequence


def test_one_sequence_with_broken_kv_fails_alone(tiny: Engine, drive: Drive) -> None:
    expected = answer(tiny, drive)
    driver = drive(tiny)
    for key in ("before", "broken", "after"):
        driver.add(key, PROMPT, greedy(12))
    for output in tiny.step():
        driver.outputs.setdefault(output.key, []).append(output)
    tiny.pool.blocks[driver.blocks["broken"][0]] = 255  # NaN in float32
    found = driver.run()
    assert found["before"] == found["after"] == expected
    last = driver.outputs["broken"][-1]
    assert (last.index, last.token_id, last.finish_reason) == (1, None, None)
    assert last.error is not None
    assert "not finite" in last.error
    assert tiny.keys() == []


def test_rubbish_left_in_blocks_reaches_nobody(tiny: Engine, drive: Drive) -> None:
    expected = answer(tiny, drive)
    tiny.pool.blocks[:] = 255
    driver = drive(tiny)
    driver.add("short", PROMPT, greedy(12))
    driver.add("long", [9] * 60, greedy(12))
    driver.add("same", PROMPT, greedy(12))
    found = driver.run()
    assert found["short"] == found["same"] == expected
    assert driver.outputs["long"][-1].error is None


def failing_for(engine: Engine, monkeypatch: pytest.MonkeyPatch, *keys: str) -> None:
    forward = engine._model.forward

    def fail(batch: Any) -> np.ndarray:
        if any(chunk.sequence.key in keys for chunk in batch.chunks):
            raise MemoryError("out of it")
        return forward(batch)

    monkeypatch.setattr(engine._model, "forward", fail)


def test_an_exception_of_one_sequence_fails_it_alone(
    tiny: Engine, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(tiny, drive)
    failing_for(tiny, monkeypatch, "bad")
    driver = drive(tiny)
    for key in ("good", "bad", "good too"):
        driver.add(key, PROMPT, greedy(12))
    found = driver.run()
    assert found["good"] == found["good too"] == expected
    assert driver.outputs["bad"][0].error == "MemoryError: out of it"


def test_an_exception_of_everybody_is_the_engines(tiny: Engine, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_for(tiny, monkeypatch, "one", "two")
    driver = drive(tiny)
    driver.add("one", PROMPT, greedy(12))
    driver.add("two", PROMPT, greedy(12))
    with pytest.raises(MemoryError):
        tiny.step()
    assert tiny.keys() == ["one", "two"]


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "here"}, "sequence here is in the engine already"),
        ({"prompt_ids": []}, "empty prompt"),
        ({"prompt_ids": [5, 97]}, "outside the vocabulary of 97"),
        ({"prompt_ids": [-1]}, "outside the vocabulary"),
        ({"prompt_ids": [5] * 100, "block_table": range(7)}, "max_model_len=100"),
        ({"output_ids": [5] * 94, "block_table": range(7)}, "101 tokens, max_model_len=100"),
        ({"output_ids": [5] * 13}, "more than its max_tokens=12"),
        ({"num_computed": 7}, r"num_computed=7 must be in 0\.\.6"),
        ({"num_computed": -1}, "num_computed=-1"),
        ({"prompt_ids": [5] * 33, "block_table": [1, 2]}, "needs 3 blocks for 33 tokens, got 2"),
        ({"block_table": [1, 64]}, r"blocks must be distinct and in 0\.\.63"),
        ({"block_table": [-1]}, "blocks must be distinct"),
        ({"block_table": [3, 3]}, "blocks must be distinct"),
    ],
)
def test_a_wrong_argument_is_refused_and_changes_nothing(tiny: Engine, changes: dict[str, Any], message: str) -> None:
    tiny.add("here", PROMPT, [], greedy(12), [0], num_computed=0)
    arguments = {"key": "new", "prompt_ids": PROMPT, "output_ids": [], "block_table": [1, 2], "num_computed": 0}
    limit = 1000 if "max_model_len" in message else 12
    with pytest.raises(EngineError, match=message):
        tiny.add(**(arguments | changes), sampling=greedy(limit))
    assert tiny.keys() == ["here"]


def test_an_unknown_sequence_is_refused_by_name(tiny: Engine) -> None:
    with pytest.raises(EngineError, match="no sequence nobody"):
        tiny.stop("nobody")
    with pytest.raises(EngineError, match="no sequence nobody"):
        tiny.extend("nobody", [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 5}, "max_num_batched_tokens=4"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"block_size_tokens": 0}, "block_size_tokens=0"),
        ({"max_model_len": 513}, r"max_model_len=513 must be in 2\.\.512"),
        ({"device": "gpu:0"}, "built for CPUs only"),
        ({"num_threads": 3}, "wants 3 threads"),
    ],
)
def test_an_engine_that_cannot_work_says_which_value_is_wrong(
    options: dict[str, Any],
    message: str,
    tiny_folder: Callable[..., TinyFolder],
    new_engine: Callable[..., Engine],
) -> None:
    with pytest.raises(StartupError, match=message):
        new_engine(tiny_folder(), **({"num_blocks": 4} | options))


# Start


def test_warming_up_leaves_nothing_behind(tiny: Engine, drive: Drive) -> None:
    said: list[str] = []
    tiny.warm_up(said.append)
    assert said == ["warming up prefill", "warming up decode"]
    assert not tiny.pool.blocks.any()
    assert tiny.keys() == []


def test_warming_up_notices_a_model_that_computes_no_numbers(
    tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine]
) -> None:
    folder = tiny_folder()
    folder.weights["model.layers.2.mlp.down_proj.weight"][3, 3] = np.nan
    broken = new_engine(folder, num_blocks=4, max_num_seqs=2, max_num_batched_tokens=8)
    with pytest.raises(StartupError, match="not finite"):
        broken.warm_up(lambda _: None)
    broken.close()


def test_layouts_tell_models_and_block_sizes_apart(
    tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine]
) -> None:
    folder, other = tiny_folder(), tiny_folder()
    other.fingerprint = "1"
    engines = [
        new_engine(folder, num_blocks=2),
        new_engine(folder, num_blocks=4),
        new_engine(other, num_blocks=2),
        new_engine(folder, num_blocks=2, block_size_tokens=8),
        new_engine(folder, num_blocks=2, kv_cache_dtype="float16"),
    ]
    layouts = [each.layout for each in engines]
    assert layouts[0] == layouts[1] == engines[0].pool.layout
    assert len(set(layouts)) == 4
    for each in engines:
        each.close()
