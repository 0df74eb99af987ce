"""What a fault does to one thing on its way."""

from __future__ import annotations

from dataclasses import dataclass

Delays = tuple[float, ...]
"""Of a message, bell or event: how much later than usual each copy of it comes. () = lost, two = doubled."""

ON_TIME: Delays = (0.0,)


@dataclass(frozen=True, slots=True)
class CallFate:
    """Of a ledger call."""

    arrives_s: float | None = 0.0
    """How much later than usual it reaches the server; None: never."""
    answered: int | None = None
    """How many of its commands' answers come back; None: all."""
    breaks_s: float | None = None
    """When the caller sees the connection break; None: it waits for its timeout."""


FINE = CallFate()
