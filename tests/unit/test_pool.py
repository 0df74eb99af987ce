"""The Celery pool's ends, with a host that only remembers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from app.settings import get_settings
from workers.pool import NodePool


class SlowHost:
    """Its drain lasts until it is asked to hand back."""

    wants_bells = False

    def __init__(self) -> None:
        self.said: list[str] = []
        self._hand_back = threading.Event()

    def drain(self, timeout_s: float) -> bool:
        self.said.append(f"drain {timeout_s:g}")
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGQUIT)).start()
        return self._hand_back.wait(10)

    def hand_back(self) -> None:
        self.said.append("hand back")
        self._hand_back.set()

    def close(self) -> None:
        self.said.append("close")


@pytest.fixture
def quit_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGQUIT)
    yield
    signal.signal(signal.SIGQUIT, before)


@pytest.mark.usefixtures("quit_handler")
def test_sigquit_during_a_drain_makes_it_hand_back_at_once() -> None:
    pool, host = NodePool(limit=1), SlowHost()
    pool._host = host  # type: ignore[assignment]
    pool.on_stop()
    assert host.said == [f"drain {get_settings().drain_timeout_s:g}", "hand back", "close"]
