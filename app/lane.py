"""A lane: one thread that handles what is put into its queue, in order, everything that waits in one go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class End:
    """What tells a queue's reader that nothing follows."""


END = End()


class Lane(Generic[T]):
    """Runs ``handle(batch)`` on its own thread for what was put, oldest first.

    An exception out of ``handle`` is a bug or a broken machine: the lane ends and tells ``on_crash(name, error)``.
    After ``close`` nobody is told any more: what it works with may be gone.
    ``entered_at`` is the monotonic time at which the current batch (or, where ``handle`` says ``entered`` for each,
    the current item) began, 0 while idle: what a watchdog looks at.
    """

    def __init__(
        self, name: str, handle: Callable[[list[T]], None], on_crash: Callable[[str, BaseException], None]
    ) -> None:
        self.name = name
        self.entered_at = 0.0
        self._handle = handle
        self._on_crash = on_crash
        self._closed = False
        self._queue: SimpleQueue[T | End] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: T) -> None:
        """Hand over one item; never blocks."""
        self._queue.put(item)

    def close(self, timeout_s: float = 5.0) -> None:
        """Handle what waits, then end the thread."""
        self._closed = True
        self._queue.put(END)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def entered(self) -> None:
        """Progress: one item of the batch begins."""
        self.entered_at = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                batch, more = take_all(self._queue)
                if batch:
                    self.entered()
                    self._handle(batch)
                    self.entered_at = 0.0
                if not more:
                    return
        except BaseException as error:  # noqa: BLE001 - ends the process
            if not self._closed:
                self._on_crash(self.name, error)


def take_all(queue: SimpleQueue[T | End], timeout_s: float | None = None) -> tuple[list[T], bool]:
    """Wait for an item (up to ``timeout_s``), take all there are; False when END was among them."""
    batch: list[T] = []
    try:
        item = queue.get(timeout=timeout_s)
        while not isinstance(item, End):
            batch.append(item)
            item = queue.get_nowait()
    except Empty:
        return batch, True
    return batch, False
