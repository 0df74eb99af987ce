"""Feeds: the sequences of one request from one mailbox; each is heard, none is forgotten for another."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import pytest

from app.protocol.commands import Attach, AttachAnswer, AttachStatus, Event, ReadStatus, SnapshotAnswer, Watcher
from web.ends import Ended
from web.events import Mail
from web.feed import QUIET_S
from web.feeds import Feeds

WATCHER = Watcher("web", "connection")
UIDS = ("u", "u.1", "u.2")


class Rig:
    """Three records in a ledger, and those who read them."""

    def __init__(self, *attached: tuple[int, ...]) -> None:
        self.now = 0.0
        self.tokens: dict[str, tuple[int, ...]] = dict.fromkeys(UIDS, ())
        self.state = dict.fromkeys(UIDS, "DECODING")
        self.asked: list[str] = []
        self.mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        records = [replace(self.record(uid), output_ids=ids) for uid, ids in zip(UIDS, attached, strict=False)]
        ledger: Any = self
        self.feeds = Feeds(ledger, UIDS, WATCHER, self.mailbox, records, clock=lambda: self.now)
        self.got: list[list[int]] = [[], [], []]
        self.ends: list[int] = []

    def record(self, uid: str, start: int = 0) -> SnapshotAnswer:
        finished = self.state[uid] == "FINISHED"
        return SnapshotAnswer(
            ReadStatus.FOUND,
            0,
            uid,
            state=self.state[uid],
            output_from=start,
            output_ids=self.tokens[uid][start:],
            finish_reason="stop" if finished else None,
        )

    def execute(self, command: Any) -> Any:
        self.asked.append(f"{command.name} {command.uid}")
        if isinstance(command, Attach):
            return AttachAnswer(AttachStatus.ATTACHED, 0, self.record(command.uid))
        return self.record(command.uid, command.from_index)

    def tell(self, uid: str, index: int, *tokens: int, **end: Any) -> None:
        self.mailbox.put(Event(uid, index, tokens, **end))

    def drain(self) -> None:
        """All that can be had now."""
        quiet = 0
        while quiet < 2:
            news = self.feeds.next(0)
            quiet = 0 if news or not self.mailbox.empty() else quiet + 1
            if news:
                index, progress = news
                self.got[index] += progress.tokens
                if progress.finish_reason:
                    self.ends.append(index)


def test_events_of_all_reach_the_one_they_are_of_and_each_ends_once() -> None:
    rig = Rig()
    rig.tell("u.1", 0, 5)
    rig.tell("u", 0, 6)
    rig.tell("u.1", 1, 7, state="FINISHED", finish_reason="stop")
    rig.tell("u.1", 1, 7, state="FINISHED", finish_reason="stop")
    rig.tell("u", 1, 8)
    rig.drain()
    assert (rig.got, rig.ends, rig.asked) == ([[6, 8], [5, 7], []], [1], [])


def test_what_was_there_before_comes_first_for_each() -> None:
    rig = Rig((1,), (2, 3), ())
    rig.tell("u.2", 0, 4)
    rig.drain()
    assert (rig.got, rig.asked) == ([[1], [2, 3], [4]], [])


def test_a_silent_one_is_read_while_another_never_stops_talking() -> None:
    rig = Rig()
    rig.tokens["u.1"], rig.state["u.1"] = (5, 6), "FINISHED"
    for index in range(8):
        rig.now += QUIET_S / 4
        rig.tell("u", index, index)
        rig.drain()
    assert (rig.got, rig.ends) == ([[*range(8)], [5, 6], []], [1])
    assert "snapshot u" not in rig.asked


def test_after_a_change_of_the_ledger_each_that_is_open_is_watched_anew_once() -> None:
    rig = Rig()
    rig.tell("u", 0, 5, state="FINISHED", finish_reason="stop")
    rig.drain()
    rig.tokens["u.2"] = (9,)
    rig.mailbox.put(None)
    rig.drain()
    assert (rig.got, rig.asked) == ([[5], [], [9]], ["attach u.1", "attach u.2"])


def test_one_that_ends_badly_ends_all() -> None:
    rig = Rig()
    rig.tell("u", 0, 5, state="FINISHED", finish_reason="stop")
    rig.tell("u.1", 0, state="FAILED", error_code="engine_error", error_detail="why")
    with pytest.raises(Ended, match="engine_error: why"):
        rig.drain()
