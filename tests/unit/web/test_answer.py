"""Answer: deltas joined are the whole text; nothing of a stop string is ever shown; every token counts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.protocol.commands import Event, ReadStatus, SnapshotAnswer
from app.schemas import SamplingParams
from tests.api.support import IM_END, ids, toy_tokenizer
from web.answer import Answer, Delta, usage
from web.follow import Ask, Follower, Progress

TOKENIZER = toy_tokenizer()


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=100, **fields)


def run(tokens: list[int], sizes: list[int], stop: tuple[str, ...] = ()) -> tuple[Answer, list[Delta]]:
    answer, deltas, start = Answer(TOKENIZER, (1, 2, 3), sampling(stop=stop)), [], 0
    for size in [*sizes, len(tokens)]:
        piece, start = tuple(tokens[start : start + size]), start + size
        last = start >= len(tokens)
        deltas.append(answer.add(Progress(piece, "stop" if last else None)))
        if last:
            break
    return answer, deltas


@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=40))
def test_deltas_join_to_the_text_without_eos_however_they_come(text: str, sizes: list[int]) -> None:
    answer, deltas = run([*ids(text), IM_END], sizes)
    assert "".join(d.text for d in deltas) == answer.text == text
    assert usage([answer], 1) == {
        "prompt_tokens": 3,
        "completion_tokens": len(text.encode()) + 1,
        "total_tokens": len(text.encode()) + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@given(st.lists(st.integers(1, 4), max_size=40))
def test_a_stop_string_over_several_tokens_is_never_sent_in_part(sizes: list[int]) -> None:
    _, deltas = run(ids("one STOP"), sizes, ("STOP",))
    assert "".join(d.text for d in deltas) == "one "
    assert not any("S" in d.text for d in deltas)


def test_what_only_looked_like_a_stop_string_comes_at_last() -> None:
    answer, deltas = run(ids("a ST"), [1, 1, 1, 1], ("STOP",))
    assert answer.text == "a ST"
    assert deltas[-1].text == "ST"


def test_half_a_character_waits_for_its_end() -> None:
    _, deltas = run(ids("é!"), [1, 1, 1])
    assert [d.text for d in deltas] == ["", "é", "!"]


def record(tokens: list[int], start: int, length: int) -> SnapshotAnswer:
    """The record of an answer that has ``length`` of its ``tokens`` so far, read from ``start``."""
    ended = length == len(tokens)
    return SnapshotAnswer(
        ReadStatus.FOUND,
        0,
        state="FINISHED" if ended else "DECODING",
        output_from=start,
        output_ids=tuple(tokens[start:length]),
        finish_reason="stop" if ended else None,
    )


STEPS = ("event", "old event", "lost event", "record", "loss")


def deliver(tokens: list[int], data: st.DataObject) -> list[Progress]:
    """Progress of an answer whose tokens come in any pieces: attempts that end anywhere, repeats, gaps healed by the
    record, a ledger that lost its last tokens and computes them again, an attachment in the middle."""
    follower = Follower()
    length = data.draw(st.integers(0, len(tokens)), "tokens before the attachment")
    out = [follower.read(record(tokens, 0, length))]

    def hear(start: int, end: int) -> Progress | Ask | None:
        state = "FINISHED" if end == len(tokens) else ""
        return follower.hear(Event("u", start, tuple(tokens[start:end]), state, "stop" if state else None))

    def ended() -> bool:
        return any(isinstance(each, Progress) and each.finish_reason is not None for each in out)

    for kind in data.draw(st.lists(st.sampled_from(STEPS), max_size=20), "what comes"):
        said: Progress | Ask | None = Ask.RECORD if kind == "record" else None
        start, end = length, min(length + data.draw(st.integers(0, 5), "tokens of the event"), len(tokens))
        if kind == "loss" and length < len(tokens):
            length = data.draw(st.integers(0, length), "tokens left")
            follower.distrust()
        elif kind == "old event":
            said = hear(data.draw(st.integers(0, length), "from"), length)
        elif kind in ("event", "lost event"):
            said, length = hear(start, end) if kind == "event" else None, end
        out.append(follower.read(record(tokens, follower.read_from, length)) if said is Ask.RECORD else said)
        if ended():
            break
    while not ended():
        out.append(follower.read(record(tokens, follower.read_from, len(tokens))))
    return [each for each in out if isinstance(each, Progress)]


@given(
    st.text(alphabet="aSTOP é世🙂", max_size=12),
    st.sampled_from([(), ("STOP",), ("世🙂", "é"), ("OP", "STOP")]),
    st.text(alphabet="é世🙂S", max_size=3),
    st.data(),
)
def test_text_and_usage_do_not_depend_on_how_the_tokens_came(
    before: str, stop: tuple[str, ...], after: str, data: st.DataObject
) -> None:
    text = before + (stop[0] if stop else "") + after
    tokens = [*ids(text), IM_END]
    if data.draw(st.booleans(), "ends in half a character"):
        tokens[-1:] = "🙂".encode()[:2]
        text += "\N{REPLACEMENT CHARACTER}"
    answer = Answer(TOKENIZER, (1, 2, 3), sampling(stop=stop))
    sent = "".join(answer.add(progress).text for progress in deliver(tokens, data))
    cut = first_stop(text, stop)
    assert sent == answer.text == text[:cut]
    assert answer.token_ids == tokens
    assert usage([answer], 1)["completion_tokens"] == len(tokens)


def first_stop(text: str, stop: tuple[str, ...]) -> int:
    """Where the stop string that is complete first begins; of several, the longest."""
    ends = [(text.index(s) + len(s), -len(s)) for s in stop if s in text]
    return sum(min(ends)) if ends else len(text)


def test_usage_counts_each_prompt_once_and_as_cached_what_none_of_its_answers_computed() -> None:
    answers = [Answer(TOKENIZER, (1,) * length, sampling(), i) for i, length in enumerate((20, 20, 5, 5))]
    for answer, cached_tokens in zip(answers, (16, 0, 3, 4), strict=True):
        answer.add(Progress((5, 6), "stop", cached_tokens=cached_tokens))
    assert usage(answers, 2) == {
        "prompt_tokens": 25,
        "completion_tokens": 8,
        "total_tokens": 33,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
