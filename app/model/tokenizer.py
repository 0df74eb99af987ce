"""Text ↔ token ids, and what each token adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import tokenizers

from app.errors import InvalidRequest, ModelError


class DecoderKind(StrEnum):
    """How tokens become text. The two that ``app.text`` can do incrementally."""

    BYTE_LEVEL = "byte level"
    """A token is a string of bytes; the text is all bytes read as UTF-8."""
    BYTE_FALLBACK = "byte fallback"
    """A token is text with ▁ for a space, or one byte as ``<0x0A>``; a run of byte tokens is read as UTF-8."""


class Tokenizer:
    """A model's tokenizer: ``tokenizers.Tokenizer`` with the model's BOS rule, and bytes per token.

    Safe to share between threads.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, bos_token: str = "", add_bos: bool | None = None) -> None:
        """``add_bos`` None leaves what stands in front of a prompt to the post-processor of ``inner``.

        Raises:
            ModelError: a decoder that cannot be run incrementally, or no BOS where one is asked for.
        """
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._add_bos = add_bos
        self.bos_id: int | None = inner.token_to_id(bos_token) if bos_token else None
        if add_bos and self.bos_id is None:
            raise ModelError(f"tokenizer: prompts must start with BOS, but {bos_token!r} is no token")
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        self.decoder_kind, self.strip_left = _decoder_kind(inner)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, file: Path, *, bos_token: str = "", add_bos: bool | None = None) -> Tokenizer:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{file}: not UTF-8") from error
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception, nothing narrower
            raise ModelError(f"{file}: not a tokenizer: {error}") from error
        return cls(inner, bos_token=bos_token, add_bos=add_bos)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; special tokens written in it become their ids.

        ``add_special_tokens`` puts BOS in front where the model wants that, unless the text brings it.
        Say False for a rendered chat, which holds its special tokens already.

        Raises:
            InvalidRequest: half a surrogate pair in ``text``.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: lone surrogate at character {error.start}") from error
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens and self._add_bos is None).ids
        if not add_special_tokens or self.bos_id is None:
            return ids
        if self._add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids[1:] if ids[:2] == [self.bos_id, self.bos_id] else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids outside the vocabulary add nothing."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text, as bytes; empty for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._inner.id_to_token(token_id) or ""
            to_bytes = _byte_level_bytes if self.decoder_kind is DecoderKind.BYTE_LEVEL else _byte_fallback_bytes
            known = self._bytes[token_id] = to_bytes(token)
        return known

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one raw byte, ``<0x0A>``; never under BYTE_LEVEL, where all tokens are bytes."""
        if self.decoder_kind is DecoderKind.BYTE_LEVEL:
            return False
        return _BYTE_TOKEN.fullmatch(self._inner.id_to_token(token_id) or "") is not None


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from characters to bytes: bytes that print stand for themselves, the others start at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_LEVEL[char] for char in token)
    except KeyError:  # an added token outside the alphabet stands for itself
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _decoder_kind(inner: tokenizers.Tokenizer) -> tuple[DecoderKind, int]:
    """Return the kind, and how many leading spaces of a whole text are dropped."""
    if inner.decoder is None:
        raise ModelError("tokenizer: no decoder")
    decoder = json.loads(inner.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL, 0
    if names in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        strip: dict[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        plain = steps[0]["pattern"] == {"String": "▁"} and steps[0]["content"] == " "
        if plain and strip["content"] == " " and strip["stop"] == 0:
            return DecoderKind.BYTE_FALLBACK, int(strip["start"])
    raise ModelError(f"tokenizer: decoder {' + '.join(names)} is not supported")
