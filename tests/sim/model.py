"""The make-believe language model, and what it answers when nothing disturbs it.

The KV of a position depends on its token and on the KV before it; a token on the KV of *all* positions as they are
found, on the seed and on its index. So KV that is missing, stale or somebody else's shows as a wrong token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import xxhash

BLOCK_TOKENS = 4
EOS = 0
_EOS_EVERY = 50
_VOCABULARY = 9973
_MASK = 2**63 - 1
NOTHING_YET = 0
"""KV of a position that nobody has written."""


def kv_of(before: int, token: int) -> int:
    """KV of a position, from the KV of the position before it and the token at it."""
    mixed = (before ^ (token + 1) * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    return (mixed ^ mixed >> 31) or 1


def next_token(kv: Sequence[int], seed: int, index: int) -> int:
    """The token drawn at ``index`` of the answer, from the KV of all positions before it."""
    number = xxhash.xxh3_64_intdigest(array("Q", (*kv, seed, index)).tobytes())
    return EOS if number % _EOS_EVERY == 0 else 1 + number % _VOCABULARY


@lru_cache(maxsize=4096)
def reference(prompt: tuple[int, ...], seed: int, max_tokens: int, ignore_eos: bool) -> tuple[int, ...]:
    """The answer of an undisturbed run; needs none of the code under test."""
    kv: list[int] = []
    for token in prompt:
        kv.append(kv_of(kv[-1] if kv else NOTHING_YET, token))
    answer: list[int] = []
    while len(answer) < max_tokens and (ignore_eos or not answer or answer[-1] != EOS):
        answer.append(next_token(kv, seed, len(answer)))
        kv.append(kv_of(kv[-1], answer[-1]))
    return tuple(answer)


def logprobs_of(token: int, index: int) -> str:
    """What goes with a token for those who ask for logprobs."""
    return f"-{token}.{index}"


def other_token(token: int) -> int:
    """What is drawn instead of ``token`` where two candidates tie and the numerics decide."""
    return 1 + (token + 4217) % _VOCABULARY


def tied_answer(prompt: tuple[int, ...], seed: int, tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` may be the beginning of an answer in which every draw may be either of two.

    An answer that is spliced from two runs is none: its tokens do not follow from each other.
    """
    kv: list[int] = []
    for token in prompt:
        kv.append(kv_of(kv[-1] if kv else NOTHING_YET, token))
    for index, token in enumerate(tokens):
        expected = next_token(kv, seed, index)
        if token not in (expected, other_token(expected)):
            return False
        kv.append(kv_of(kv[-1], token))
    return True
