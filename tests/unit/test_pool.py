"""The Celery pool's ends, with a host that only remembers."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

import workers.pool
from app.errors import LedgerUnavailable, StartupError
from app.settings import get_settings
from workers import control, kv_node
from workers.pool import NodePool, make_host


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


def test_a_signal_wakes_the_event_loop() -> None:
    pool, readers = NodePool(limit=1), []
    hub = SimpleNamespace(add_reader=lambda fd, callback: readers.append(fd))
    handler, wakeup_fd = signal.signal(signal.SIGUSR1, lambda *_: None), signal.set_wakeup_fd(-1)
    try:
        pool.register_with_event_loop(hub)
        assert not select.select(readers, [], [], 0)[0]
        signal.raise_signal(signal.SIGUSR1)
        assert select.select(readers, [], [], 1)[0] == readers
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        signal.signal(signal.SIGUSR1, handler)
        pool.on_stop()


def test_a_server_that_evicts_is_refused_in_every_role_and_one_that_is_away_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    monkeypatch.setattr(control, "make_host", lambda settings, nodename: made.append("control"))
    monkeypatch.setattr(kv_node, "make_host", lambda settings, role, nodename, on_room: made.append(role))

    def check(error: Exception) -> Callable[[object], None]:
        def fail(settings: object) -> None:
            raise error

        return fail

    monkeypatch.setattr(workers.pool, "check_server", check(StartupError("it may drop records")))
    for role in ("prefill", "decode", "control"):
        with pytest.raises(StartupError, match="it may drop records"):
            make_host(role, f"{role}1@here", lambda: None)
    monkeypatch.setattr(workers.pool, "check_server", check(LedgerUnavailable("refused")))
    for role in ("prefill", "decode", "control"):
        make_host(role, f"{role}1@here", lambda: None)
    assert made == ["prefill", "decode", "control"]
