"""What this process is: its incarnation, and whether it has been told to stop.

The gunicorn hooks write it (``gunicorn_conf.py``); everything else reads it. There is one per process.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass
class Process:
    """Facts about one web process. Assignments are atomic, so a signal handler may make them."""

    incarnation: str = ""
    """Drawn by the arbiter before the fork, so that it can report the exit of exactly this process."""
    drain_deadline: float = math.inf
    """Monotonic time at which open answers end with an error; infinite while nobody asked to stop."""

    @property
    def draining(self) -> bool:
        return self.drain_deadline != math.inf

    @property
    def drain_over(self) -> bool:
        return time.monotonic() >= self.drain_deadline

    def begin_drain(self, drain_timeout_s: float) -> None:
        """Give open answers ``drain_timeout_s`` more; a second call can only shorten that. Takes no lock."""
        self.drain_deadline = min(self.drain_deadline, time.monotonic() + drain_timeout_s)


PROCESS = Process()
