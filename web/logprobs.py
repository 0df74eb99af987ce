"""Logprobs as clients read them: OpenAI's two shapes, one entry for each output token, EOS and stop tokens too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.logprobs import TokenLogprobs
from app.model.tokenizer import Tokenizer
from app.text import IncrementalDetokenizer

Json = dict[str, Any]


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
    """``choices[].logprobs`` of a chat."""
    content = []
    for token_id, each in zip(token_ids, logprobs, strict=True):
        top = [_chat_token(tokenizer, other, logprob) for other, logprob in each.top]
        content.append(_chat_token(tokenizer, token_id, each.own) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {"token": _name(raw), "logprob": logprob, "bytes": list(raw)}


class CompletionLogprobs:
    """``choices[].logprobs`` of a completion; its parts for parts of an answer, joined, are those of the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = IncrementalDetokenizer(tokenizer)
        self._length = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        """Of the next tokens. ``text_offset`` is where the text that a token completes begins, in characters."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            self._length += len(self._text.push((token_id,)))
        return {
            "text_offset": offsets,
            "token_logprobs": [each.own for each in logprobs],
            "tokens": [self._named(token_id) for token_id in token_ids],
            "top_logprobs": [self._top(*pair) for pair in zip(token_ids, logprobs, strict=True)],
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that was drawn even if it is none of them."""
        top: dict[str, float] = {}
        for other, logprob in (*logprobs.top, (token_id, logprobs.own)):
            top.setdefault(self._named(other), logprob)
        return top

    def _named(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        name = _name(raw)
        return name if name.encode() == raw else f"bytes:{name}"


def _name(raw: bytes) -> str:
    """The token as text; a piece of a character as ``\\xe2\\x82``, as OpenAI writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)
