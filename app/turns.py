"""How soon a thread gets its turn."""

from __future__ import annotations

import sys

_TURN_S = 0.0005


def take_short_turns() -> None:
    """Have the interpreter change threads after half a millisecond of Python, not after five.

    A request passes through several threads of each process that it meets, and each of them may find another at work.
    """
    sys.setswitchinterval(_TURN_S)
