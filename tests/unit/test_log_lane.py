"""Whoever logs does not wait for the log to be written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from app import log_lane
from app.log_lane import LogLane, unblock


class Pipe(logging.Handler):
    """Writes only while somebody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.read.wait()
        self.lines.append(record.getMessage())


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.read.set()


def logger_with(handler: logging.Handler) -> logging.Logger:
    logger = logging.getLogger("of-this-test")
    logger.propagate = False
    logger.handlers = [handler]
    unblock(logger)
    return logger


def lane_of(logger: logging.Logger) -> LogLane:
    (lane,) = logger.handlers
    assert isinstance(lane, LogLane)
    return lane


def test_a_full_pipe_holds_nobody_up_and_what_was_dropped_is_said(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lane, "MOST_LINES", 3)
    monkeypatch.setattr(log_lane, "FLUSH_S", 5.0)
    logger = logger_with(pipe)
    for number in range(10):
        logger.warning("line %s", number)
    pipe.read.set()
    lane_of(logger).flush()
    written = [line for line in pipe.lines if line.startswith("line")]
    assert written[:3] == ["line 0", "line 1", "line 2"]
    assert f"{10 - len(written)} log lines were dropped: nobody took them" in pipe.lines


def test_a_flush_waits_for_what_was_logged_but_not_for_ever(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lane, "FLUSH_S", 0.05)
    logger = logger_with(pipe)
    logger.warning("one")
    lane_of(logger).flush()
    assert pipe.lines == []
    monkeypatch.setattr(log_lane, "FLUSH_S", 5.0)
    pipe.read.set()
    lane_of(logger).flush()
    assert pipe.lines == ["one"]


def test_a_trace_is_kept_and_a_second_time_changes_nothing(pipe: Pipe) -> None:
    logger = logger_with(pipe)
    lane = lane_of(logger)
    unblock(logger)
    assert lane_of(logger) is lane
    pipe.read.set()
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    lane.flush()
    assert "failed" in pipe.lines[0]
    assert "ValueError: why" in pipe.lines[0]
