"""Signals and time as one thing to wait for, so that the launcher needs neither polling nor threads."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wakeup:
    """Made by ``listen``. Only in the main thread, where Python delivers signals.

    Attributes:
        stops: how often somebody asked to stop (Ctrl-C, SIGTERM, a closed terminal).
        restarts: how often somebody asked for a rolling restart (SIGUSR1).
    """

    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader
        self.stops = 0
        self.restarts = 0

    @classmethod
    @contextmanager
    def listen(cls) -> Iterator[Wakeup]:
        """Take over SIGCHLD, SIGUSR1 and the signals that stop, until the end of the block."""
        reader, writer = socket.socketpair()
        with reader, writer:
            reader.setblocking(False)
            writer.setblocking(False)
            wakeup = cls(reader)
            old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            # nohup lets us ignore a closed terminal; a shell's background jobs ignore Ctrl-C, yet may be sent one
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            stops = [number for number in _STOP_SIGNALS if not (number == signal.SIGHUP and ignored)]
            old = {number: signal.signal(number, wakeup._asked_to_stop) for number in stops}
            old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, wakeup._asked_to_restart)
            old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _only_wakes)
            try:
                yield wakeup
            finally:
                for number, handler in old.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(old_fd)

    def wait(self, timeout_s: float) -> None:
        """Return at a signal, one that came since the last wait included, or after ``timeout_s``."""
        readable, _, _ = select.select([self._reader], [], [], max(timeout_s, 0))
        if readable:
            self._drain()

    def _drain(self) -> None:
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            return

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1

    def _asked_to_restart(self, number: int, frame: FrameType | None) -> None:
        self.restarts += 1


def _only_wakes(number: int, frame: FrameType | None) -> None:
    """A handler must exist, else the signal is dropped before it reaches the wake-up socket."""


class Deadline:
    """A point in monotonic time."""

    def __init__(self, in_s: float) -> None:
        self._at = time.monotonic() + in_s

    @property
    def left_s(self) -> float:
        return max(self._at - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        return self.left_s == 0.0
