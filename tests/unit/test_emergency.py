"""The unwanted ends of a worker: when one comes, when it does not, and by when it has come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workers.emergency import Emergency

STALL_S = 120.0
REFUSED_FOR_S = 7.0


class Worker:
    """What an emergency does to its process, written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.done: list[str] = []
        self.ends_in: list[float] = []
        monkeypatch.setattr("workers.emergency.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr("workers.emergency.end_in", self.ends_in.append)
        monkeypatch.setattr("workers.emergency.do_not_end", self.ends_in.clear)
        monkeypatch.setattr("workers.emergency.end_crashed", lambda *_: self.done.append("crashed"))
        monkeypatch.setattr("workers.emergency.end_refused", lambda _, detail: self.done.append(f"refused: {detail}"))
        self.emergency = Emergency(
            "decode1@h",
            stall_s=STALL_S,
            refused_for_s=REFUSED_FOR_S,
            shut=lambda: self.done.append("shut"),
            last_words=lambda part, why: self.done.append(f"last words of {part}"),
        )

    def refuse_for(self, seconds: float) -> None:
        """Once at the beginning of this time and once at its end."""
        self.emergency.refused("no")
        self.now += seconds
        self.emergency.refused("no")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_a_broken_node_takes_nothing_more_then_speaks_then_ends(worker: Worker) -> None:
    worker.emergency.crashed("engine", ZeroDivisionError())
    assert worker.done == ["shut", "last words of engine", "crashed"]


def test_last_words_that_fail_in_a_way_that_nobody_foresaw_do_not_keep_the_process_alive(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(worker.emergency, "_last_words", fail)
    with pytest.raises(ZeroDivisionError):
        worker.emergency.crashed("engine", RuntimeError())
    assert worker.done == ["shut", "crashed"]


def test_while_the_watchdog_looks_the_process_ends_soon_after_it_would_have_found_a_stall(worker: Worker) -> None:
    worker.emergency.watched()
    assert len(worker.ends_in) == 1
    assert STALL_S < worker.ends_in[0] <= STALL_S + 2


def test_what_the_parts_of_a_node_do_that_ends_as_it_should_is_no_emergency(worker: Worker) -> None:
    worker.emergency.watched()
    worker.emergency.close()
    worker.emergency.watched()
    worker.emergency.crashed("link", RuntimeError("closed"))
    assert (worker.done, worker.ends_in) == ([], [])


def test_a_refusal_ends_the_process_only_when_it_has_lasted(worker: Worker) -> None:
    worker.refuse_for(REFUSED_FOR_S - 0.1)
    assert worker.done == []
    worker.now += 0.2
    worker.emergency.refused("no")
    assert worker.done == ["refused: no"]


def test_a_refusal_that_passed_does_not_count_with_the_next(worker: Worker) -> None:
    worker.refuse_for(REFUSED_FOR_S - 1)
    worker.emergency.accepted()
    worker.now += REFUSED_FOR_S
    worker.refuse_for(REFUSED_FOR_S - 1)
    assert worker.done == []
