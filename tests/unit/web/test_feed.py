"""Feed: when the record is read and the request watched anew, and what a ledger that is away means for the client."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import LedgerError, LedgerUnavailable, LedgerUnknown, ServiceUnavailable
from app.protocol.commands import (
    Attach,
    AttachAnswer,
    AttachStatus,
    Event,
    ReadStatus,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)
from web.ends import Ended
from web.events import Mail
from web.feed import OUTAGE_S, QUIET_S
from web.feeds import Feeds

WATCHER = Watcher("web", "connection")


class Record:
    """A ledger that holds one record: it answers snapshots of it, and attachments to it."""

    def __init__(self, tokens: Sequence[int] = (), state: str = "DECODING") -> None:
        self.tokens = tuple(tokens)
        self.answer = SnapshotAnswer(ReadStatus.FOUND, 0, state=state, finish_reason="stop" if state else None)
        self.away: LedgerError | None = None
        self.attach = AttachStatus.ATTACHED
        self.asked: list[Snapshot | Attach] = []

    def execute(self, command: Any) -> SnapshotAnswer | AttachAnswer:
        self.asked.append(command)
        if self.away is not None:
            raise self.away
        if isinstance(command, Snapshot):
            return self.read(command.from_index)
        assert command == Attach("u", WATCHER)
        has_record = self.attach in (AttachStatus.ATTACHED, AttachStatus.ENDED)
        return AttachAnswer(self.attach, 0, self.read(0) if has_record else None)

    def read(self, start: int) -> SnapshotAnswer:
        return replace(self.answer, output_from=start, output_ids=self.tokens[start:])


class Rig:
    def __init__(self, record: Record | None = None, start: SnapshotAnswer | None = None) -> None:
        self.now = 0.0
        self.record = record or Record()
        self.mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        ledger: Any = self.record
        self.feed = Feeds(ledger, ["u"], WATCHER, self.mailbox, [start] if start else [], clock=lambda: self.now)
        self.got: list[int] = []
        self.finish_reason: str | None = None

    def tell(self, index: int, *tokens: int, **end: Any) -> None:
        self.mailbox.put(Event("u", index, tokens, **end))
        self.step()

    def ledger_changed(self) -> None:
        self.mailbox.put(None)
        self.step()

    def step(self) -> None:
        news = self.feed.next(0)
        if news is not None:
            _, progress = news
            self.got.extend(progress.tokens)
            self.finish_reason = progress.finish_reason

    def asked(self) -> list[str]:
        names = [command.name for command in self.record.asked]
        self.record.asked.clear()
        return names


def test_events_in_order_need_no_reading() -> None:
    rig = Rig()
    rig.tell(0, 5)
    rig.tell(1, 6, 7)
    rig.tell(3, 8, state="FINISHED", finish_reason="length")
    assert (rig.got, rig.finish_reason, rig.asked()) == ([5, 6, 7, 8], "length", [])


def test_a_gap_is_read_from_the_record() -> None:
    rig = Rig(Record([5, 6, 7, 8]))
    rig.tell(0, 5)
    rig.tell(3, 8)
    assert (rig.got, rig.asked()) == ([5, 6, 7, 8], ["snapshot"])


def test_quiet_reads_the_record_and_sees_the_end() -> None:
    rig = Rig(Record([5, 6], "FINISHED"))
    rig.step()
    assert rig.asked() == []
    rig.now = QUIET_S
    rig.step()
    assert (rig.got, rig.finish_reason) == ([5, 6], "stop")


def test_an_end_without_success_is_raised_from_an_event_and_from_the_record() -> None:
    by_event, by_record = Rig(), Rig(Record([5], "FAILED"))
    with pytest.raises(Ended, match="pull_failed: node d1"):
        by_event.tell(0, state="FAILED", error_code="pull_failed", error_detail="node d1")
    by_record.record.answer = replace(by_record.record.answer, error_code="pull_failed")
    by_record.now = QUIET_S
    with pytest.raises(Ended, match="pull_failed"):
        by_record.step()


def test_the_record_an_answer_was_attached_with_comes_first_and_events_go_on_from_it() -> None:
    rig = Rig(start=Record([5, 6]).read(0))
    rig.tell(1, 6)
    assert rig.got == [5, 6]
    rig.step()
    rig.tell(2, 7)
    assert (rig.got, rig.asked()) == ([5, 6, 7], [])


def test_a_changed_ledger_is_asked_to_watch_again_and_what_it_repeats_is_not_sent_twice() -> None:
    rig = Rig(Record([5]))
    rig.tell(0, 5, 6, 7)
    rig.ledger_changed()
    assert (rig.got, rig.asked()) == ([5, 6, 7], ["attach"])
    rig.record.tokens = (5, 6, 7)
    rig.tell(1, 6)
    rig.tell(3, 8)
    assert (rig.got, rig.asked()) == ([5, 6, 7, 8], ["snapshot"])


def test_after_a_rollback_another_answer_is_an_error_even_if_its_events_are_lost() -> None:
    rig = Rig(Record([5]))
    rig.tell(0, 5, 6, 7)
    rig.ledger_changed()
    rig.record.tokens = (5, 9, 9, 9)
    rig.now = 2 * QUIET_S
    with pytest.raises(Ended, match="different_tokens"):
        rig.step()


def test_a_finished_record_that_is_shorter_than_what_was_sent_is_an_error() -> None:
    rig = Rig(Record([5, 6], "FINISHED"))
    rig.tell(0, 5, 6, 7)
    rig.now = 2 * QUIET_S
    with pytest.raises(Ended, match="different_tokens"):
        rig.step()


def test_a_request_that_is_gone_from_a_changed_ledger_is_an_error_to_try_again_on() -> None:
    rig = Rig()
    rig.record.attach = AttachStatus.UNKNOWN
    with pytest.raises(Ended) as caught:
        rig.ledger_changed()
    assert caught.value.error.retry_helps


@pytest.mark.parametrize("not_now", [AttachStatus.REFUSED, AttachStatus.LATE, LedgerUnavailable("away")])
def test_watching_again_is_repeated_until_it_is_taken_whatever_events_still_come(not_now: Any) -> None:
    rig = Rig(Record([5, 6, 7]))
    if isinstance(not_now, LedgerError):
        rig.record.away = not_now
    else:
        rig.record.attach = not_now
    rig.ledger_changed()
    rig.now = QUIET_S / 2
    rig.tell(0, 5)
    assert rig.asked() == ["attach"]
    rig.now = QUIET_S
    rig.tell(1, 6)
    rig.record.attach, rig.record.away = AttachStatus.ATTACHED, None
    rig.now = 2 * QUIET_S
    rig.step()
    rig.step()
    rig.now = 4 * QUIET_S
    rig.step()
    assert (rig.asked(), rig.got) == (["attach", "attach", "snapshot"], [5, 6, 7])


def test_an_attachment_of_unknown_outcome_says_how_long_it_may_still_come() -> None:
    rig = Rig()
    rig.record.away = LedgerUnknown("no answer", not_after_ms=700)
    assert rig.feed.attach_until_ms < 0
    rig.ledger_changed()
    assert rig.feed.attach_until_ms == 700


def test_a_short_outage_is_waited_for_and_a_long_one_told() -> None:
    rig = Rig()
    rig.record.away = LedgerUnavailable("away")
    rig.now = QUIET_S
    rig.step()
    rig.now += OUTAGE_S - 1
    rig.step()
    rig.record.away = None
    rig.now += QUIET_S
    rig.step()
    rig.record.away = LedgerUnavailable("away")
    rig.now += QUIET_S
    rig.step()
    rig.now += OUTAGE_S
    with pytest.raises(ServiceUnavailable):
        rig.step()


def test_a_ledger_that_refuses_to_watch_again_for_long_is_an_outage() -> None:
    rig = Rig()
    rig.record.attach = AttachStatus.REFUSED
    rig.ledger_changed()
    rig.now = OUTAGE_S
    with pytest.raises(ServiceUnavailable):
        rig.step()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_any_loss_doubling_and_order_of_events_gives_the_same_answer(answer: list[int], data: st.DataObject) -> None:
    attached = data.draw(st.none() | st.integers(0, len(answer) - 1))
    rig = Rig(Record(answer, "FINISHED"), None if attached is None else Record(answer[:attached]).read(0))
    events = [Event("u", i, tuple(answer[i : i + n])) for i in range(len(answer)) for n in (1, 2)]
    for mail in data.draw(st.lists(st.sampled_from([None, *events]), max_size=20)):
        rig.mailbox.put(mail)
    while rig.finish_reason is None:
        rig.now += QUIET_S / 4
        rig.step()
    assert rig.got == answer
