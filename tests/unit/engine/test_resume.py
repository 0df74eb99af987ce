"""An answer that another attempt goes on with, at every place, is the answer of an undisturbed run."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from app.kv import KVReader
from app.logprobs import TokenLogprobs
from app.schemas import FinishReason, SamplingParams

from .conftest import Driver, TinyFolder, greedy, tiny_piece

if TYPE_CHECKING:
    from workers.engine.engine import Engine

Drive = Callable[..., Driver]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
EOS = (21, 22, 23)
MAX_MODEL_LEN = 40


@dataclass(frozen=True)
class Ended:
    """What follows in an answer from some place on."""

    tokens: list[int]
    finish: FinishReason | None


@dataclass
class Pair:
    """A prefill and a decode engine of the same weights, with different steps, and the KV transport between them."""

    prefill: Engine
    decode: Engine
    drive: Drive
    reader: KVReader

    def undisturbed(self, sampling: SamplingParams) -> Ended:
        driver = self.drive(self.decode)
        driver.add("whole", PROMPT, sampling)
        tokens = driver.run()["whole"]
        return Ended(tokens, driver.outputs["whole"][-1].finish_reason)

    def resumed(self, sampling: SamplingParams, answer: list[int]) -> tuple[list[Ended], list[int]]:
        """For each k what follows ``answer[:k]``; and at which k prefill's own token was the last.

        All at once, so that each also runs beside others that are elsewhere.
        """
        before, after = self.drive(self.prefill, reserve_tokens=0), self.drive(self.decode, reserve_tokens=0)
        for k in range(len(answer)):
            before.add(str(k), PROMPT, sampling, output_ids=tuple(answer[:k]), one_token=True)
        first = before.run()
        at_prefill = [k for k in range(len(answer)) if before.outputs[str(k)][-1].finish_reason is not None]
        for k in sorted(set(range(len(answer))) - set(at_prefill)):
            self._hand_over(str(k), before, after, len(PROMPT) + len(answer) + 1)
            output_ids = (*answer[:k], *first[str(k)])
            after.add(str(k), PROMPT, sampling, output_ids=output_ids, num_computed=len(PROMPT) + k)
        rest = after.run()
        found = []
        for k in range(len(answer)):
            outputs = before.outputs[str(k)] + after.outputs.get(str(k), [])
            assert [output.index for output in outputs] == list(range(k, k + len(outputs)))
            found.append(Ended(first[str(k)] + rest.get(str(k), []), outputs[-1].finish_reason))
        return found, at_prefill

    def _hand_over(self, key: str, before: Driver, after: Driver, num_tokens: int) -> None:
        source, target = before.blocks[key], after.allocate(key, num_tokens)
        generations = [int(generation) for generation in self.prefill.pool.generations[source]]
        digests = self.prefill.pool.digest(source)
        location = self.prefill.pool.location()
        self.reader.pull(location, source, generations, digests, self.decode.pool, target[: len(source)])


@pytest.fixture
def pair(
    tiny_folder: Callable[..., TinyFolder], new_engine: Callable[..., Engine], drive: Drive, reader: KVReader
) -> Iterator[Pair]:
    folder, limits = tiny_folder(eos_token_ids=EOS), {"num_blocks": 128, "max_model_len": MAX_MODEL_LEN}
    prefill = new_engine(folder, incarnation="prefill", max_num_seqs=4, max_num_batched_tokens=14, **limits)
    decode = new_engine(folder, incarnation="decode", **limits)
    yield Pair(prefill, decode, drive, reader)
    prefill.close()
    decode.close()


SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 40}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}


OPTIONS = {"min_p": 0.02, "logit_bias": ((21, 3.0), (60, 1.5), (5, -100.0)), "min_tokens": 24, "stop_token_ids": (70,)}


@pytest.mark.parametrize(
    ("sampling", "finish", "length"),
    [
        (greedy(24, ignore_eos=True), "length", 24),
        (greedy(24, ignore_eos=True, **PENALTIES), "length", 24),
        (greedy(24, seed=3, ignore_eos=True, **SAMPLED), "length", 24),
        (greedy(24, seed=3, ignore_eos=True, **SAMPLED, **PENALTIES), "length", 24),
        (greedy(1, seed=3, **SAMPLED), "length", 1),
        (greedy(2, seed=3, **SAMPLED), "length", 2),
        (greedy(1000, seed=3, ignore_eos=True, **SAMPLED), "length", MAX_MODEL_LEN - len(PROMPT)),
        (greedy(1000, seed=12, **SAMPLED, **PENALTIES), "stop", None),
        (greedy(24, seed=3, **SAMPLED, **PENALTIES, **OPTIONS), "length", 24),
    ],
    ids=[
        "greedy",
        "greedy, penalties",
        "sampled",
        "sampled, penalties",
        "one token",
        "two",
        "context full",
        "EOS",
        "options",
    ],
)
def test_every_split_of_an_answer_goes_on_with_the_same_tokens_to_the_same_end(
    pair: Pair, sampling: SamplingParams, finish: FinishReason, length: int | None
) -> None:
    whole = pair.undisturbed(sampling)
    assert whole.finish == finish
    assert len(whole.tokens) == length or (length is None and len(whole.tokens) > 5)
    assert (whole.tokens[-1] in EOS) == (finish == "stop")
    found, at_prefill = pair.resumed(sampling, whole.tokens)
    assert found == [Ended(whole.tokens[k:], finish) for k in range(len(whole.tokens))]
    assert at_prefill == [len(whole.tokens) - 1], "the last token is prefill's own: no decode needed"


def test_logprobs_go_on_where_an_earlier_attempt_stopped(pair: Pair) -> None:
    sampling = greedy(16, seed=3, ignore_eos=True, logprobs=5, **SAMPLED, **PENALTIES)
    driver = pair.drive(pair.decode)
    driver.add("whole", PROMPT, sampling)
    answer = driver.run()["whole"]
    whole = [output.logprobs for output in driver.outputs["whole"]]
    assert len(set(whole)) == 16
    before = pair.drive(pair.prefill, reserve_tokens=0)
    for k in range(16):
        before.add(str(k), PROMPT, sampling, output_ids=tuple(answer[:k]), one_token=True)
    before.run()
    for k in range(16):
        [first] = before.outputs[str(k)]
        _assert_close(first.logprobs, whole[k])
    after = pair.drive(pair.decode, reserve_tokens=0)
    pair._hand_over("7", before, after, len(PROMPT) + 17)
    after.add("7", PROMPT, sampling, output_ids=tuple(answer[:8]), num_computed=len(PROMPT) + 7)
    assert after.run()["7"] == answer[8:]
    for output, expected in zip(after.outputs["7"], whole[8:], strict=True):
        _assert_close(output.logprobs, expected)


def _assert_close(text: str, expected: str) -> None:
    """Another node rounds the same logits otherwise."""
    told, wanted = TokenLogprobs.unpack(text), TokenLogprobs.unpack(expected)
    assert told.own == pytest.approx(wanted.own, abs=1e-4)
    assert [token for token, _ in told.top] == [token for token, _ in wanted.top]
    assert [p for _, p in told.top] == pytest.approx([p for _, p in wanted.top], abs=1e-4)


def certain_text(ids: list[int]) -> str:
    """The text of ``ids`` without a character that is still open."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(tiny_piece, ids)))


def stops_in(ids: list[int]) -> list[str]:
    """Stop strings all over the text, short and long, each of them first complete at a different place."""
    text = certain_text(ids)
    return [text[start : start + length] for start, length in ((2, 1), (5, 2), (11, 3), (3, 15), (24, 5), (1, 30))]


def test_every_split_within_a_stop_string_and_within_a_character_ends_where_the_undisturbed_run_does(
    pair: Pair,
) -> None:
    sampling = greedy(24, seed=3, ignore_eos=True, **SAMPLED, **PENALTIES)
    tokens = pair.undisturbed(sampling).tokens
    stops = stops_in(tokens)
    assert any("€" in stop for stop in stops)
    ends = set()
    for stop in stops:
        stopping = sampling.model_copy(update={"stop": ("not there", stop)})
        end = next(n for n in range(1, len(tokens) + 1) if stop in certain_text(tokens[:n]))
        whole = pair.undisturbed(stopping)
        assert whole == Ended(tokens[:end], "stop"), stop
        found, at_prefill = pair.resumed(stopping, whole.tokens)
        assert found == [Ended(whole.tokens[k:], "stop") for k in range(end)], stop
        assert at_prefill == [end - 1]
        ends.add(end)
    assert len(ends) > 3


def test_a_character_half_of_which_an_earlier_attempt_wrote_is_whole_for_the_next(pair: Pair) -> None:
    """€ is cut by every border between even tokens: a checker that began anew would see two broken halves."""
    sampling = greedy(24, seed=3, ignore_eos=True, **SAMPLED)
    tokens = pair.undisturbed(sampling).tokens
    stop = next(n for n in range(2, 24) if certain_text(tokens[:n]).count("€") == 1)
    assert certain_text(tokens[: stop - 1]).count("€") == 0
    stopping = sampling.model_copy(update={"stop": ("€",)})
    found, _ = pair.resumed(stopping, tokens[:stop])
    assert found[-1] == Ended([tokens[stop - 1]], "stop")


@pytest.mark.parametrize("one_token", [True, False])
def test_an_answer_that_has_ended_is_ended_without_computing(pair: Pair, one_token: bool) -> None:
    stop = certain_text([31, 33])
    for output_ids, changes, finish in (
        ([31, 33], {"stop": (stop,)}, "stop"),
        ([31, 33, 35], {"stop": (stop,)}, "stop"),
        ([31, EOS[0]], {}, "stop"),
        ([31, 33], {"max_tokens": 2}, "length"),
        ([31] * (MAX_MODEL_LEN - len(PROMPT)), {}, "length"),
        ([31, 33], {"max_tokens": 2, "stop": (stop,)}, "stop"),
        ([31, 33], {"stop_token_ids": (33,), "ignore_eos": True}, "stop"),
        ([31, 33], {"max_tokens": 2, "stop": (stop,), "min_tokens": 2}, "length"),
    ):
        sampling = greedy(**{"max_tokens": 100, **changes})
        engine = pair.prefill
        assert (
            engine.add("ended", PROMPT, output_ids, sampling, [0, 1, 2], num_computed=0, one_token=one_token) == finish
        )
        assert engine.keys() == []
        assert not engine.has_work
    assert engine.add("open", PROMPT, [31, EOS[0]], greedy(ignore_eos=True), [0], num_computed=0) is None
