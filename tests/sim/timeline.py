"""What will happen, in order of virtual time.

A happening is a value: a bound method of some part of the world with its arguments, never a closure. So a world with
all that is still to come in it can be copied, and something else than the clock may choose what comes next.
"""

from __future__ import annotations

import heapq
from functools import partial
from typing import Any

Happening = partial[Any]
"""``functools.partial`` of a bound method of a ``Part``."""


class Timeline:
    """Pending happenings. Those of one moment come in the order in which they were put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Happening]] = []
        self._number = 0

    def at(self, when: float, what: Happening) -> None:
        """Let ``what`` happen at ``when``, or now if that has passed."""
        self._number += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._number, what))

    def pop(self, until: float) -> Happening | None:
        """The next happening, at whose time it is now; None if there is none up to ``until``, and it is then."""
        heap = self._heap
        if not heap or heap[0][0] > until:
            self.now = until
            return None
        self.now, _, what = heapq.heappop(heap)
        return what

    def pending(self) -> list[tuple[float, int, Happening]]:
        """All that is still to come: (when, number, what), by time."""
        return sorted(self._heap, key=_order)

    def take(self, number: int) -> Happening:
        """Take one happening out of its turn. Time moves to its moment if that is later than now."""
        index = next(i for i, entry in enumerate(self._heap) if entry[1] == number)
        when, _, what = self._heap[index]
        self._heap[index] = self._heap[-1]
        self._heap.pop()
        heapq.heapify(self._heap)
        self.now = max(self.now, when)
        return what


def _order(entry: tuple[float, int, Happening]) -> tuple[float, int]:
    return entry[:2]
