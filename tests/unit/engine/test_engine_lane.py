"""The engine's thread: what goes wrong with one sequence is that sequence's error, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Work
from workers.engine_lane import EngineLane

from .conftest import TinyFolder, greedy

if TYPE_CHECKING:
    from workers.engine.engine import Engine

PROMPT = (5, 6, 7, 8, 9, 10, 11)
ANSWER = 12


@pytest.fixture
def engine(tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine]) -> Iterator[Engine]:
    made = new_engine(tiny_folder(eos_token_ids=(90,)), num_blocks=32, max_num_batched_tokens=64)
    yield made
    made.close()


class Lane:
    """A lane of a real engine, and all that it said."""

    def __init__(self, engine: Engine) -> None:
        self.crashes: list[tuple[str, BaseException]] = []
        self._said: SimpleQueue[on.Event] = SimpleQueue()
        self._lane = EngineLane(engine, self._said.put, lambda *crash: self.crashes.append(crash))

    def put(
        self, key: str, blocks: tuple[int, ...], *, output_ids: tuple[int, ...] = (), computed: int = 0, **changes: Any
    ) -> None:
        sampling = greedy(**{"max_tokens": ANSWER, "ignore_eos": True} | changes)
        work = Work(key, key, 1, key, PROMPT, output_ids, sampling)
        self._lane.put(do.Start(key, work, blocks, num_computed=computed, one_token=False))

    def extend(self, key: str, *blocks: int) -> None:
        self._lane.put(do.Extend(key, blocks))

    def start(self) -> None:
        self._lane.start()

    def next_tokens(self, count: int) -> list[int]:
        """Wait for so many."""
        tokens: list[int] = []
        while len(tokens) < count:
            event = self._said.get(timeout=20)
            assert isinstance(event, on.Stepped)
            tokens += [sample.token for sample in event.samples]
        return tokens

    def close(self) -> None:
        self._lane.close()

    def run(self, sequences: int) -> dict[str, list[on.Sample]]:
        """Start, and collect samples until so many sequences have ended."""
        self._lane.start()
        samples: dict[str, list[on.Sample]] = {}
        ended = 0
        while ended < sequences:
            event = self._said.get(timeout=20)
            assert isinstance(event, on.Stepped)
            for sample in event.samples:
                samples.setdefault(sample.key, []).append(sample)
                ended += bool(sample.error) or sample.finish_reason is not None
        self._lane.close()
        return samples


def alone(engine: Engine) -> list[int]:
    engine.add("alone", PROMPT, [], greedy(ANSWER, ignore_eos=True), [0, 1], num_computed=0)
    tokens = []
    while engine.has_work:
        tokens += [output.token_id for output in engine.step()]
    return [token for token in tokens if token is not None]


def test_faulty_sequences_end_with_an_error_each_and_the_others_with_their_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(engine)

    def broken(stops: tuple[str, ...], tokenizer: object, min_tokens: int) -> None:
        raise LookupError("nobody thought of this")

    monkeypatch.setattr("workers.engine.engine.StopChecker", broken)
    engine.pool.blocks[[8, 9]] = 255  # NaN in float32
    lane = Lane(engine)
    lane.put("first", (2, 3))
    lane.put("outside the pool", (4, 32))
    lane.put("same block twice", (4, 4))
    lane.put("too few blocks", (4,), output_ids=tuple(expected[:11]), computed=17)
    lane.put("broken KV", (8, 9), output_ids=(expected[0],), computed=7)
    lane.put("other model's tokens", (4, 5), output_ids=(97,))
    lane.put("unforeseen", (4, 5), stop=("x",))
    lane.put("ended before", (4, 5), output_ids=(90,), ignore_eos=False)
    lane.put("last", (6, 7))
    samples = lane.run(9)
    assert lane.crashes == []
    assert [sample.token for sample in samples.pop("first")] == expected
    assert [sample.token for sample in samples.pop("last")] == expected
    [ended] = samples.pop("ended before")
    assert (ended.tokens, ended.finish_reason, ended.error) == ((), "stop", "")
    assert {(len(each), each[0].tokens, each[0].finish_reason) for each in samples.values()} == {(1, (), None)}
    hopeless = {"outside the pool", "same block twice", "too few blocks", "other model's tokens"}
    assert {key for key, each in samples.items() if not each[0].retry_helps} == hopeless
    errors = {key: each[0].error for key, each in samples.items()}
    assert "distinct and in 0..31" in errors["outside the pool"]
    assert "distinct" in errors["same block twice"]
    assert "needs 2 blocks for 18 tokens, got 1" in errors["too few blocks"]
    assert "not finite" in errors["broken KV"]
    assert "vocabulary of 97" in errors["other model's tokens"]
    assert errors["unforeseen"] == "LookupError: nobody thought of this"
    assert engine.keys() == []


def test_a_sequence_whose_blocks_are_full_waits_for_more_and_goes_on_as_if_it_had_had_them(engine: Engine) -> None:
    expected = alone(engine)
    lane = Lane(engine)
    lane.put("grows", (2,))
    fits = engine.block_size_tokens - len(PROMPT) + 1
    lane.start()
    tokens = lane.next_tokens(fits)
    assert not engine.has_work, "its block is full"
    lane.extend("grows", 3)
    tokens += lane.next_tokens(ANSWER - fits)
    lane.close()
    assert tokens == expected
    assert lane.crashes == []


def test_blocks_for_a_sequence_that_has_just_ended_are_not_missed(engine: Engine) -> None:
    expected = alone(engine)
    lane = Lane(engine)
    lane.extend("ended", 4)
    lane.put("other", (2, 3))
    samples = lane.run(1)
    assert [sample.token for sample in samples["other"]] == expected
    assert lane.crashes == []
