"""Text of an answer while it grows, and stop strings in it. Pure: a function of all output ids.

A worker looks for stop strings token by token; web cuts the text at the same place. Both feed the same classes the same
ids, and both may start anew at any time by feeding all earlier output ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from app.model.tokenizer import DecoderKind, Tokenizer


class IncrementalDetokenizer:
    """Token ids in, text out, as early as that text can no longer change.

    All that ``push`` and then ``flush`` return, joined, is ``tokenizer.decode`` of all ids. The cost of a push does not
    depend on how much came before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        kind = tokenizer.decoder_kind
        self._joiner: _Joiner = _ByteLevel(tokenizer) if kind is DecoderKind.BYTE_LEVEL else _ByteFallback(tokenizer)

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; return the text that is certain now and was not before."""
        return "".join([self._joiner.add(token_id) for token_id in ids if token_id not in self._skipped])

    def flush(self) -> str:
        """Return the rest: an unfinished character as U+FFFD. Nothing may be pushed afterwards."""
        return self._joiner.end()


class _Joiner(Protocol):
    def add(self, token_id: int) -> str: ...
    def end(self) -> str: ...


class _ByteLevel:
    """Every token is bytes; a character is certain when its last byte is here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallback:
    """Tokens are text, but a run of byte tokens is decoded as a whole: one wrong byte turns all of it into U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._run = bytearray()
        self._strip_left = tokenizer.strip_left

    def add(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        if self._tokenizer.is_byte_token(token_id):
            self._run += raw
            return ""
        return self._strip(self._end_run() + raw.decode()) if raw else ""

    def end(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text


class _StopMatcher:
    """Finds the stop string that is complete first; of several that end at the same character, the longest.

    It goes character by character, so the place does not depend on where tokens or pushes begin and end. One
    Knuth-Morris-Pratt automaton per stop string: constant cost per character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._seen = 0
        self.cut: int | None = None
        """Where the first stop string starts, in characters from the start of the text; None while there is none."""

    def feed(self, text: str, *, counts: bool = True) -> None:
        """``counts``: whether a stop string that is completed here is one."""
        if self.cut is not None or not self._stops:
            return
        for char in text:
            self._seen += 1
            longest = 0
            for index in range(len(self._stops)):
                longest = max(longest, self._step(index, char))
            if longest and counts:
                self.cut = self._seen - longest
                return

    def open_chars(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def _step(self, index: int, char: str) -> int:
        """Advance one automaton; return the length of its stop string if that is complete, else 0."""
        stop, failure, state = self._stops[index], self._failures[index], self._matched[index]
        while state and stop[state] != char:
            state = failure[state - 1]
        if stop[state] == char:
            state += 1
        complete = state == len(stop)
        self._matched[index] = failure[-1] if complete else state
        return state if complete else 0


def _failure_table(stop: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    table, length = [0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = table[length - 1]
        if stop[length] == char:
            length += 1
        table.append(length)
    return table


class StopChecker:
    """The worker's side: has a stop string appeared?

    One that is complete with the first ``min_tokens`` tokens is passed over, as in vLLM.
    """

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer, min_tokens: int = 0) -> None:
        self._matcher = _StopMatcher(stops)
        self._detokenizer = IncrementalDetokenizer(tokenizer) if any(stops) else None
        self._uncounted = min_tokens

    def push(self, token_id: int) -> bool:
        """Add one output id; return whether a stop string is complete in the text so far (and stays so)."""
        if self._detokenizer is None:
            return False
        self._matcher.feed(self._detokenizer.push((token_id,)), counts=self._uncounted <= 0)
        self._uncounted -= 1
        return self._matcher.cut is not None


class StopTruncator:
    """Web's side: the text up to the first stop string, never showing the beginning of one."""

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer, min_tokens: int = 0) -> None:
        self._matcher = _StopMatcher(stops)
        self._uncounted = min_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._held = ""
        self._sent = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; nothing comes after it."""
        return self._matcher.cut is not None

    def push(self, ids: Iterable[int]) -> str:
        """Add output ids; return the text that may be sent now."""
        if self._uncounted <= 0:
            return self._release(self._detokenizer.push(ids), final=False)
        ids = list(ids)
        early, rest = ids[: self._uncounted], ids[self._uncounted :]
        text = self._release(self._detokenizer.push(early), final=False)
        self._uncounted -= len(early)
        return text + self._release(self._detokenizer.push(rest), final=False)

    def flush(self) -> str:
        """Return the rest of a finished answer. Nothing may be pushed afterwards."""
        return self._release(self._detokenizer.flush(), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        self._matcher.feed(text, counts=self._uncounted <= 0)
        self._held += text
        if self._matcher.cut is not None:
            length = self._matcher.cut - self._sent
        else:
            length = len(self._held) - (0 if final else self._matcher.open_chars())
        ready, self._held = self._held[:length], self._held[length:]
        self._sent += length
        return ready
