"""How every test waits for something that it cannot be told of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], object],
    within_s: float = 5.0,
    tell: object = "the condition did not come true in time",
    *,
    look_every_s: float = 0.01,
) -> None:
    """Wait until ``condition()`` holds, or fail after ``within_s`` with ``tell``, or with what it returns."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, tell() if callable(tell) else tell
        pause.wait(look_every_s)
