"""Notices a part of a node that has died, or that has entered something and never leaves it.

A part stamps what it enters: a step, a pull, a round of questions. A new stamp is progress, however long it all takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol


class Part(Protocol):
    """What is watched: a thread, and what it is at."""

    @property
    def name(self) -> str: ...

    @property
    def entered_at(self) -> float:
        """When it entered what it is at; 0 while it waits for something to do."""

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""


class Pulse:
    """A part that is a plain thread; whoever runs on it stamps."""

    def __init__(self, name: str, alive: Callable[[], bool]) -> None:
        self.name = name
        self.entered_at = 0.0
        self._alive = alive

    @property
    def alive(self) -> bool:
        return self._alive()


class Watchdog:
    """Looks at every part each ``look_s``, on a thread of its own, which waits for nothing else.

    Only time in which it looks counts: between two looks no more than twice ``look_s`` has passed. A process that was
    frozen, or that a busy machine did not let run, is not stuck because of that.

    ``on_fault(part, error)`` runs on this thread, once, and ends the watch. ``looking`` runs with every look: who wants
    to know that this thread itself still runs.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        stall_s: float,
        look_s: float,
        on_fault: Callable[[str, BaseException], None],
        looking: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._stall_s = stall_s
        self._look_s = look_s
        self._on_fault = on_fault
        self._looking = looking
        self._seen: dict[str, tuple[float, float]] = {}
        """What each part was at when it was last looked at, and for how long it has been seen at it."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread; every part has been started."""
        self._thread.start()

    def close(self) -> None:
        """Watch no more: the parts are about to end."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            looked_at = time.monotonic()
            while not self._closing.wait(self._look_s):
                passed_s, looked_at = time.monotonic() - looked_at, time.monotonic()
                self._looking()
                found = self._find_fault(min(passed_s, 2 * self._look_s))
                if found is not None:
                    self._on_fault(*found)
                    return
        except BaseException as error:  # noqa: BLE001 - a node that nobody watches does not go on
            self._on_fault("watchdog", error)

    def _find_fault(self, passed_s: float) -> tuple[str, BaseException] | None:
        for part in self._parts:
            if not part.alive:
                return part.name, RuntimeError("its thread is gone")
            entered_at = part.entered_at
            before, for_s = self._seen.get(part.name, (0.0, 0.0))
            for_s = for_s + passed_s if entered_at and entered_at == before else 0.0
            self._seen[part.name] = entered_at, for_s
            if for_s > self._stall_s:
                return part.name, TimeoutError(f"no progress for {for_s:.0f} s")
        return None
