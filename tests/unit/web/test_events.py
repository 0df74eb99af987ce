"""Mailboxes: every connection of a request gets its events, and only as long as it is open."""

from __future__ import annotations

import queue

from app.protocol.commands import Event
from web.events import Mail, Mailboxes


def mail_of(box: queue.SimpleQueue[Mail]) -> list[Mail]:
    return [box.get_nowait() for _ in range(box.qsize())]


def test_an_event_goes_to_every_connection_of_its_request_and_to_no_other() -> None:
    boxes = Mailboxes()
    first, second, other = boxes.open(["u"], "a"), boxes.open(["u"], "b"), boxes.open(["v"], "a")
    event = Event("u", 0, (5,))
    boxes.deliver(event)
    boxes.deliver(Event("w", 0, (6,)))
    assert (mail_of(first), mail_of(second), mail_of(other)) == ([event], [event], [])


def test_a_connection_that_closes_leaves_the_others_of_its_request_open() -> None:
    boxes = Mailboxes()
    first, second = boxes.open(["u"], "a"), boxes.open(["u"], "b")
    boxes.close(["u"], "a")
    boxes.close(["u"], "a")
    event = Event("u", 0, (5,))
    boxes.deliver(event)
    assert (mail_of(first), mail_of(second), len(boxes)) == ([], [event], 1)
    boxes.close(["u"], "b")
    boxes.deliver(event)
    assert (mail_of(second), len(boxes)) == ([], 0)


def test_a_changed_ledger_wakes_every_connection() -> None:
    boxes = Mailboxes()
    opened = [boxes.open([uid], connection) for uid in "uv" for connection in "ab"]
    boxes.wake_all()
    assert [mail_of(box) for box in opened] == [[None]] * 4
