"""Incremental text against the tokenizers package, and stop strings against a search through the whole text."""

from itertools import takewhile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Inner

from app.model.tokenizer import Tokenizer
from app.text import IncrementalDetokenizer, StopChecker, StopTruncator
from tests.unit.model.conftest import ALPHABET, SPECIALS, TOKENS, tiny_tokenizer
from tests.unit.model.conftest import default_model as default_model

BYTES = Tokenizer(tiny_tokenizer())
BYTE_IDS = {BYTES.token_bytes(i)[0]: i for i in range(len(SPECIALS), len(SPECIALS) + len(ALPHABET))}


def byte_fallback_tokenizer():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é", "▁▁", "€"]
    inner = Inner(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return Tokenizer(inner)


FALLBACK = byte_fallback_tokenizer()
KINDS = pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte level", "byte fallback"])


def utf8_ids(text):
    return [BYTE_IDS[byte] for byte in text.encode()]


def fallback_ids(text):
    return [3 + byte for byte in text.encode()]


def joined(parts):
    return [token_id for part in parts for token_id in part]


# Random ids are mostly broken UTF-8; words and whole characters in between make real text, too.
BYTE_LEVEL_IDS = st.lists(
    st.one_of(
        st.integers(0, len(TOKENS) + 2).map(lambda i: [i]),
        st.sampled_from("ab é€🏃\ufffd").map(utf8_ids),
        st.sampled_from([[TOKENS.index("Ġthe")], [TOKENS.index("he")]]),
    ),
    max_size=20,
).map(joined)
FALLBACK_IDS = st.lists(
    st.one_of(
        st.integers(0, FALLBACK.vocab_size + 2).map(lambda i: [i]),
        st.integers(259, FALLBACK.vocab_size - 1).map(lambda i: [i]),
        st.sampled_from("ab é€🏃").map(fallback_ids),
    ),
    max_size=20,
).map(joined)


def ids_of(tokenizer):
    return BYTE_LEVEL_IDS if tokenizer is BYTES else FALLBACK_IDS


def chunks(data, ids):
    """Split ``ids`` at drawn places."""
    start = 0
    while start < len(ids):
        length = data.draw(st.integers(1, 4), label="chunk")
        yield ids[start : start + length]
        start += length


@KINDS
@given(data=st.data(), skip=st.booleans())
def test_all_pushes_and_the_flush_are_the_decoded_text(tokenizer, data, skip):
    ids = data.draw(ids_of(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(chunk) for chunk in chunks(data, ids)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def default_tokenizer(default_model):
    return default_model.tokenizer()


@pytest.mark.model
@given(source=st.lists(st.integers(0, 49151), max_size=60) | st.text(max_size=30), skip=st.booleans())
def test_the_same_over_the_whole_vocabulary_of_the_default_model(default_tokenizer, source, skip):
    ids = default_tokenizer.encode(source) if isinstance(source, str) else source
    detokenizer = IncrementalDetokenizer(default_tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert text == default_tokenizer.decode(ids, skip_special_tokens=skip)


def stable_text(ids):
    """The text that no continuation can change: what all ways to go on have in common (byte level only)."""
    ways = [b"", b"a", b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80\x80", b"\xbf\xbf\xbf"]
    texts = [BYTES.decode([*ids, *(BYTE_IDS[byte] for byte in way)]) for way in ways]
    common = [chars[0] for chars in takewhile(lambda chars: len(set(chars)) == 1, zip(*texts, strict=False))]
    return "".join(common)


@given(BYTE_LEVEL_IDS)
def test_a_push_returns_all_text_that_can_no_longer_change_and_no_more(ids):
    detokenizer, text = IncrementalDetokenizer(BYTES), ""
    for i, token_id in enumerate(ids):
        text += detokenizer.push([token_id])
        assert text == stable_text(ids[: i + 1])


def test_a_character_split_over_tokens_is_never_shown_broken():
    detokenizer = IncrementalDetokenizer(BYTES)
    pushes = [detokenizer.push([token_id]) for token_id in utf8_ids("a🏃b")]
    assert pushes == ["a", "", "", "", "🏃", "b"]
    assert detokenizer.push(utf8_ids("🏃")[:3]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_byte_run_is_decided_when_it_ends():
    a = FALLBACK.decode([260])
    assert a == "a"
    detokenizer = IncrementalDetokenizer(FALLBACK)
    assert [detokenizer.push([i]) for i in [*fallback_ids("é"), 260]] == ["", "", "éa"]
    assert [detokenizer.push([i]) for i in [*fallback_ids("é"), 3 + 0xFF, 260]] == ["", "", "", "\ufffd\ufffd\ufffda"]


def test_each_token_is_looked_at_once(monkeypatch):
    seen = []
    real = BYTES.token_bytes
    monkeypatch.setattr(BYTES, "token_bytes", lambda token_id: seen.append(token_id) or real(token_id))
    detokenizer = IncrementalDetokenizer(BYTES)
    ids = utf8_ids("naïve ") * 50
    for token_id in ids:
        detokenizer.push([token_id])
    assert seen == ids


def cut_naively(text, stops):
    """Where the first stop string that gets complete starts; None if there is none."""
    for end in range(len(text) + 1):
        found = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return end - max(found)
    return None


def held_naively(text, stops):
    """How much of the end of ``text`` is the beginning of a stop string."""
    starts = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(starts, default=0)


STOPS = st.lists(st.text("ab é€\ufffdthe", max_size=4), max_size=3)


@given(BYTE_LEVEL_IDS, STOPS)
@example(utf8_ids("aab"), ["ab"])
@example(utf8_ids("ababac"), ["abac"])
@example(utf8_ids("abc"), ["abc", "b"])
@example(utf8_ids("abc"), ["abc", "bc"])
@example(utf8_ids("aabaaabaaac"), ["aabaaac"])
def test_worker_and_web_find_the_first_stop_string(ids, stops):
    checker, truncator, sent = StopChecker(stops, BYTES), StopTruncator(stops, BYTES), ""
    for i, token_id in enumerate(ids):
        stable = stable_text(ids[: i + 1])
        cut = cut_naively(stable, stops)
        assert checker.push(token_id) is (cut is not None)
        sent += truncator.push([token_id])
        assert truncator.stopped is (cut is not None)
        assert sent == (stable[: len(stable) - held_naively(stable, stops)] if cut is None else stable[:cut])
    sent += truncator.flush()
    whole = BYTES.decode(ids)
    assert sent == whole[: cut_naively(whole, stops)]


@KINDS
@given(data=st.data(), stops=STOPS)
def test_the_cut_does_not_depend_on_how_ids_arrive(tokenizer, data, stops):
    ids = data.draw(ids_of(tokenizer))
    truncator, checker = StopTruncator(stops, tokenizer), StopChecker(stops, tokenizer)
    text = ""
    for chunk in chunks(data, ids):
        text += truncator.push(chunk)
        stops_seen = [checker.push(token_id) for token_id in chunk]
        assert truncator.stopped is stops_seen[-1]
    text += truncator.flush()
    whole = tokenizer.decode(ids)
    assert text == whole[: cut_naively(whole, stops)]


@KINDS
@given(data=st.data(), stops=STOPS)
def test_starting_anew_with_all_earlier_ids_gives_the_same_state(tokenizer, data, stops):
    ids = data.draw(ids_of(tokenizer))
    place = data.draw(st.integers(0, len(ids)))
    first, resumed = StopTruncator(stops, tokenizer), StopTruncator(stops, tokenizer)
    earlier = "".join(first.push([token_id]) for token_id in ids[:place])
    assert resumed.push(ids[:place]) == earlier
    assert resumed.push(ids[place:]) + resumed.flush() == first.push(ids[place:]) + first.flush()


def cut_after(ids, stops, min_tokens):
    """As ``cut_naively``, for stop strings that are complete with a later token than the first ``min_tokens``."""
    passed = len(stable_text(ids[:min_tokens]))
    text = stable_text(ids)
    for end in range(passed + 1, len(text) + 1):
        found = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return end - max(found)
    return None


@given(st.lists(st.sampled_from(utf8_ids("ab é")), max_size=16), STOPS, st.integers(1, 10))
@example(utf8_ids("ababab"), ["abab"], 4)
@example(utf8_ids("aaaa"), ["aa"], 2)
@example(utf8_ids("aaaa"), ["aa"], 1)
@example(utf8_ids("abb"), ["ab", "b"], 2)
def test_a_stop_string_within_the_first_min_tokens_is_passed_over(ids, stops, min_tokens):
    checker = StopChecker(stops, BYTES, min_tokens)
    one_by_one, at_once = StopTruncator(stops, BYTES, min_tokens), StopTruncator(stops, BYTES, min_tokens)
    sent = ""
    for i, token_id in enumerate(ids):
        sent += one_by_one.push([token_id])
        cut = cut_after(ids[: i + 1], stops, min_tokens)
        assert checker.push(token_id) is one_by_one.stopped is (cut is not None)
        stable = stable_text(ids[: i + 1])
        assert sent == (stable[: len(stable) - held_naively(stable, stops)] if cut is None else stable[:cut])
    assert at_once.push(ids) == sent
    assert at_once.stopped is one_by_one.stopped


def test_after_a_stop_string_nothing_comes():
    truncator = StopTruncator(["b"], BYTES)
    assert truncator.push(utf8_ids("aXbY")) == "aX"
    assert truncator.stopped
    assert truncator.push(utf8_ids("Z")) + truncator.flush() == ""


def test_special_tokens_are_no_text_for_stop_strings():
    checker = StopChecker(["<|end|>", "aa"], BYTES)
    a = BYTE_IDS[ord("a")]
    assert [checker.push(token_id) for token_id in [0, a, 0, a]] == [False, False, False, True]
