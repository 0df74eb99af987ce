"""Logprobs on their way: exact to a millionth, of bounded size, in characters that the ledger may join."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.logprobs import MAX_LOGPROBS, MAX_PACKED, TokenLogprobs

LOGPROBS = st.floats(-1e4, 0) | st.sampled_from([0.0, -0.0, -1e-9, -4.9e-7, float("-inf"), -9999.9999999])
TOKENS = st.integers(0, 2**32 - 1)


@given(LOGPROBS, st.lists(st.tuples(TOKENS, LOGPROBS), max_size=MAX_LOGPROBS))
def test_what_is_packed_is_unpacked_to_a_millionth(own: float, top: list[tuple[int, float]]) -> None:
    text = TokenLogprobs(own, tuple(top)).pack()
    assert text
    assert len(text) <= MAX_PACKED
    assert "|" not in text
    assert json.dumps(text) == f'"{text}"'
    found = TokenLogprobs.unpack(text)
    assert found.pack() == text
    assert [token for token, _ in found.top] == [token for token, _ in top]
    for given_, got in zip((own, *(p for _, p in top)), (found.own, *(p for _, p in found.top)), strict=True):
        assert got == pytest.approx(max(given_, -9999), abs=6e-7)


def test_the_form() -> None:
    assert TokenLogprobs(-0.0).pack() == "0"
    assert TokenLogprobs(-0.12345678, ((11, -0.5), (7, -20.0))).pack() == "-0.123457;11:-0.5,7:-20"


@pytest.mark.parametrize("text", ["", "x", "-1;5", "-1;5:", "-1;:1", "-1|-2"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        TokenLogprobs.unpack(text)
