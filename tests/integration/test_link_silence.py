"""A listener that takes the connection and never says a word: nothing is sent, and the call still ends in time."""

from __future__ import annotations

import queue
import socket

from app.link import CallOutcome, Link
from app.protocol.messages import PullResult
from app.versions import SPOKEN

RESULT = PullResult(uid="u", attempt=1, fence="f", lease_id="l", activated=True)


def never(name: str, error: BaseException) -> None:
    """A link in these tests must not die."""
    raise AssertionError(name) from error


def test_a_call_that_waits_for_its_connection_ends_at_its_deadline_as_not_sent() -> None:
    link = Link("caller", "127.0.0.1", lambda call_id, message: None, never)
    link.version = SPOKEN.newest
    outcomes: queue.Queue[CallOutcome] = queue.Queue()
    try:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
            for timeout_s in (0.2, 0.4):
                link.call(address, "peer", RESULT, timeout_s, outcomes.put)
            ends = [outcomes.get(timeout=5) for _ in range(2)]
    finally:
        link.close()
    assert [(end.reply, end.not_sent) for end in ends] == [(None, True)] * 2
