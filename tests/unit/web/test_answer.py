"""Answer: deltas joined are the whole text; nothing of a stop string is ever shown; every token counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.api.support import IM_END, ids, toy_tokenizer
from web.answer import Answer, Delta
from web.feed import Progress

TOKENIZER = toy_tokenizer()


def run(tokens: list[int], sizes: list[int], stop: tuple[str, ...] = ()) -> tuple[Answer, list[Delta]]:
    answer, deltas, start = Answer(TOKENIZER, (1, 2, 3), stop), [], 0
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
    assert answer.usage() == {
        "prompt_tokens": 3,
        "completion_tokens": len(text.encode()) + 1,
        "total_tokens": len(text.encode()) + 4,
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
