"""Requests that are still on their way in. Each has a time by which it is here: a thread waits for it.

A timeout of the socket bounds one silence, not a client that sends a byte now and then. This bounds the whole of a
head or a body: what is late is cut off, and whoever reads it meets its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass

HEAD_S = 10.0
"""For a request's head, the wait for its first byte included; any network that can be used is faster."""

LEFT_S = 1.0
"""For it while the process drains: what was on its way when the drain began still comes."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    until: float
    until_in_drain: float
    cut: Callable[[], None]


class Arrivals:
    """What threads wait for, and until when. Any thread may say so; one of them cuts off what is late.

    ``who`` is the connection, or whatever else stands for it; ``cut()`` may raise OSError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[Hashable, _Arrival] = {}

    def expect_head(self, who: Hashable, cut: Callable[[], None]) -> None:
        """A thread begins to read a request."""
        now = time.monotonic()
        self._expect(who, _Arrival(now + HEAD_S, now + LEFT_S, cut))

    def expect_body(self, who: Hashable, within_s: float, cut: Callable[[], None]) -> None:
        """A thread begins to read a body."""
        until = time.monotonic() + within_s
        self._expect(who, _Arrival(until, until, cut))

    def is_here(self, who: Hashable) -> bool:
        """The thread has read it, or given up. False if it was cut off, or not expected."""
        with self._lock:
            return self._expected.pop(who, None) is not None

    def cut_late(self, *, draining: bool = False) -> None:
        """Cut off what is late. While ``draining`` a head is so soon: its client can still go elsewhere."""
        now = time.monotonic()
        with self._lock:  # held to the end: what has arrived is not cut off
            for who, arrival in list(self._expected.items()):
                if (arrival.until_in_drain if draining else arrival.until) <= now:
                    del self._expected[who]
                    with suppress(OSError):  # closed already
                        arrival.cut()

    def _expect(self, who: Hashable, arrival: _Arrival) -> None:
        with self._lock:
            self._expected[who] = arrival


ARRIVALS = Arrivals()
"""This process's."""
