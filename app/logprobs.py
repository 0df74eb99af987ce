"""Log probabilities of one output token, as they travel with it from the engine to web.

Packed: ``-0.1273;11:-0.1273,29:-2.5`` is the token's own, then the likeliest tokens with theirs, most likely first. The
ledger keeps it beside the token and does not look inside. With 20 of them a token costs less than half a kilobyte.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOGPROBS = 20
"""Of the likeliest tokens that may be named with each token; OpenAI's bound of ``top_logprobs``."""
_DECIMALS = 6
"""Finer differences are float32's rounding, which depends on what else is in a batch."""
_FLOOR = -9999.0
"""Below any that a model gives; what clients of OpenAI and vLLM know for "as good as never"."""
MAX_PACKED = (MAX_LOGPROBS + 1) * (len("4294967295:") + len("-9999.123456,"))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities."""

    own: float
    """Of the token that was drawn."""
    top: tuple[tuple[int, float], ...] = ()
    """Token id and logprob of the likeliest ones, most likely first."""

    def pack(self) -> str:
        """As text without ``|`` and spaces, never empty; rounded to a millionth."""
        top = ",".join(f"{token_id}:{_text(logprob)}" for token_id, logprob in self.top)
        return f"{_text(self.own)};{top}" if top else _text(self.own)

    @classmethod
    def unpack(cls, text: str) -> TokenLogprobs:
        """What ``pack`` wrote. Raises ValueError for anything else."""
        own, _, top = text.partition(";")
        pairs = (pair.split(":") for pair in top.split(",")) if top else ()
        return cls(float(own), tuple((int(token_id), float(logprob)) for token_id, logprob in pairs))


def _text(logprob: float) -> str:
    """Shortest form; 0 has no sign, and what is too small for a number is the floor."""
    rounded = round(max(logprob, _FLOOR), _DECIMALS)
    return f"{rounded:.{_DECIMALS}f}".rstrip("0").rstrip(".") if rounded else "0"
