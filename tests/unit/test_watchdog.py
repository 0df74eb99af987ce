"""The watchdog: what is progress, what is not, and that time in which it could not look does not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import wait_for
from workers.watchdog import Pulse, Watchdog

LOOK_S = 0.01
STALL_S = 0.5


class Watch:
    """A watchdog over two parts, and what it found."""

    def __init__(self) -> None:
        self.alive = True
        self.looks = 0
        self.faults: list[tuple[str, type[BaseException]]] = []
        self.first, self.second = Pulse("first", lambda: True), Pulse("second", lambda: self.alive)
        self.looking: Callable[[], None] = lambda: None
        self.dog = Watchdog((self.first, self.second), STALL_S, LOOK_S, self._fault, self._look)
        self.dog.start()

    def _look(self) -> None:
        self.looks += 1
        self.looking()

    def _fault(self, part: str, error: BaseException) -> None:
        self.faults.append((part, type(error)))

    def look(self, times: int) -> None:
        upto = self.looks + times
        wait_for(lambda: self.looks >= upto or self.faults)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.dog.close()


def test_a_part_that_entered_something_and_never_leaves_it_is_found_by_its_name(watch: Watch) -> None:
    began = time.monotonic()
    watch.second.entered_at = began
    wait_for(lambda: watch.faults)
    assert watch.faults == [("second", TimeoutError)]
    assert time.monotonic() - began >= STALL_S


def test_a_part_that_waits_for_something_to_do_is_never_stuck(watch: Watch) -> None:
    watch.look(int(2 * STALL_S / LOOK_S))
    assert watch.faults == []


def test_each_new_stamp_is_progress_however_long_all_of_it_takes(watch: Watch) -> None:
    until = time.monotonic() + 3 * STALL_S
    while time.monotonic() < until:
        watch.first.entered_at = time.monotonic()
        watch.look(int(STALL_S / LOOK_S / 10))
    assert watch.faults == []


def test_a_part_whose_thread_is_gone_is_found_with_the_next_look(watch: Watch) -> None:
    watch.alive = False
    watch.look(2)
    assert watch.faults == [("second", RuntimeError)]


def test_time_in_which_the_process_did_not_run_makes_nothing_stuck(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep_s = 0.0
    monkeypatch.setattr("workers.watchdog.time", SimpleNamespace(monotonic=lambda: time.monotonic() + asleep_s))
    watch.first.entered_at = time.monotonic()
    watch.look(2)
    asleep_s = 1000.0
    watch.look(3)
    assert watch.faults == []
    wait_for(lambda: watch.faults)
    assert watch.faults == [("first", TimeoutError)], "it is stuck all the same once it does not move while we look"


def test_a_watch_that_cannot_go_on_is_a_fault_of_its_own(watch: Watch) -> None:
    def broken() -> Any:
        raise ZeroDivisionError

    watch.looking = broken
    wait_for(lambda: watch.faults)
    assert watch.faults == [("watchdog", ZeroDivisionError)]


def test_a_closed_watch_finds_nothing(watch: Watch) -> None:
    watch.dog.close()
    watch.alive = False
    looks = watch.looks
    threading.Event().wait(5 * LOOK_S)
    assert (watch.looks, watch.faults) == (looks, [])
