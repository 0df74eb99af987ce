"""What is late is cut off, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from web.arrivals import HEAD_S, LEFT_S, Arrivals


class Door:
    """Arrivals on a clock of their own, and who was cut off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("web.arrivals.time", SimpleNamespace(monotonic=lambda: self.now))
        self.arrivals = Arrivals()
        self.cut: list[str] = []

    def head(self, who: str) -> None:
        self.arrivals.expect_head(who, lambda: self.cut.append(who))

    def body(self, who: str, within_s: float) -> None:
        self.arrivals.expect_body(who, within_s, lambda: self.cut.append(who))

    def after(self, seconds: float, *, draining: bool = False) -> list[str]:
        self.now += seconds
        self.arrivals.cut_late(draining=draining)
        return self.cut


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    return Door(monkeypatch)


def test_a_head_has_its_time_and_no_more(door: Door) -> None:
    door.head("a")
    assert door.after(HEAD_S - 0.1) == []
    assert door.after(0.1) == ["a"]
    assert door.after(HEAD_S) == ["a"], "once"


def test_a_body_has_the_time_that_its_length_takes(door: Door) -> None:
    door.body("a", 100.0)
    assert door.after(99.0) == []
    assert door.after(1.0) == ["a"]


def test_what_is_here_is_cut_off_no_more(door: Door) -> None:
    door.head("a")
    door.arrivals.is_here("a")
    assert door.after(HEAD_S, draining=True) == []


def test_a_drain_waits_for_a_head_that_is_on_its_way_but_not_long(door: Door) -> None:
    """Whoever asks on a connection that is kept open may not have heard of the drain yet."""
    door.head("a")
    assert door.after(LEFT_S - 0.1, draining=True) == []
    assert door.after(0.1, draining=True) == ["a"]


def test_a_drain_waits_for_a_body(door: Door) -> None:
    door.body("a", 10.0)
    assert door.after(9.0, draining=True) == []


def test_a_connection_that_is_closed_already_keeps_nobody_from_the_next(door: Door) -> None:
    def closed() -> None:
        raise OSError

    door.arrivals.expect_head("a", closed)
    door.head("b")
    assert door.after(HEAD_S) == ["b"]
