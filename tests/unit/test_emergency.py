"""The unwanted ends of a worker: when one comes, when it does not, and by when it has come."""

from __future__ import annotations

import pytest

from workers.emergency import CLOSING_S, Emergency

STALL_S = 120.0
LAST_WORDS_S = 3.0


class Worker:
    """What an emergency does to its process, written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.ends_in: list[float] = []
        monkeypatch.setattr("workers.emergency.end_in", self.ends_in.append)
        monkeypatch.setattr("workers.emergency.end_crashed", lambda *_: self.done.append("crashed"))
        self.emergency = Emergency(
            "decode1@h",
            stall_s=STALL_S,
            last_words_s=LAST_WORDS_S,
            shut=lambda: self.done.append("shut"),
            last_words=lambda part, why: self.done.append(f"last words of {part}"),
        )


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
    assert STALL_S < worker.ends_in[0] <= STALL_S + LAST_WORDS_S


def test_what_the_parts_of_a_node_do_that_ends_as_it_should_is_no_emergency(worker: Worker) -> None:
    worker.emergency.watched()
    worker.emergency.close()
    worker.emergency.watched()
    worker.emergency.crashed("link", RuntimeError("closed"))
    assert worker.done == []
    assert worker.ends_in[1:] == [CLOSING_S], "but it does not take for ever"


def test_a_node_that_is_told_to_end_among_its_last_words_has_no_more_time_for_them(worker: Worker) -> None:
    worker.emergency.crashed("engine", RuntimeError())
    worker.emergency.close()
    assert worker.ends_in == [LAST_WORDS_S]
