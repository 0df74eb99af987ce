"""What an engine is asked."""

from __future__ import annotations

from typing import Protocol


class Peer(Protocol):
    """One engine with the model loaded, on a number of threads that is set."""

    name: str

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute a prompt of so many tokens and its first token."""

    def decode_tokens_per_s(self, batch: int, context: int, steps: int) -> float:
        """Tokens per second of so many sequences that decode together, each with ``context`` tokens before."""
