"""Feed: whatever events are lost, doubled or late, the tokens come gap-free and from one answer only."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import LedgerUnavailable, RequestAborted, RequestExpired, RequestFailed, ServiceUnavailable
from app.protocol.commands import Event, ReadStatus, Snapshot, SnapshotAnswer
from web.events import Mail
from web.feed import OUTAGE_S, QUIET_S, Ended, Feed


class Record:
    """A ledger that holds one record and answers snapshots of it."""

    def __init__(self, tokens: Sequence[int] = (), state: str = "DECODING") -> None:
        self.tokens = tuple(tokens)
        self.answer = SnapshotAnswer(ReadStatus.FOUND, 0, state=state)
        self.away = False
        self.reads = 0

    def execute(self, command: Any) -> SnapshotAnswer:
        assert isinstance(command, Snapshot)
        self.reads += 1
        if self.away:
            raise LedgerUnavailable("away")
        return replace(self.answer, output_from=command.from_index, output_ids=self.tokens[command.from_index :])


class Rig:
    def __init__(self, record: Record | None = None) -> None:
        self.now = 0.0
        self.record = record or Record()
        self.mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self.feed = Feed(self.record, "u", self.mailbox, clock=lambda: self.now)  # type: ignore[arg-type]
        self.got: list[int] = []
        self.finish_reason: str | None = None

    def tell(self, index: int, *tokens: int, **end: Any) -> None:
        self.mailbox.put(Event("u", index, tokens, **end))
        self.step()

    def step(self, timeout_s: float = 0) -> None:
        progress = self.feed.next(timeout_s)
        if progress is not None:
            self.got.extend(progress.tokens)
            self.finish_reason = progress.finish_reason


def test_events_in_order_need_no_reading() -> None:
    rig = Rig()
    rig.tell(0, 5)
    rig.tell(1, 6, 7)
    rig.tell(3, 8, state="FINISHED", finish_reason="length")
    assert (rig.got, rig.finish_reason, rig.record.reads) == ([5, 6, 7, 8], "length", 0)


def test_a_repeat_adds_nothing_and_an_overlap_only_its_end() -> None:
    rig = Rig()
    rig.tell(0, 5, 6)
    rig.tell(0, 5)
    rig.tell(1, 6, 7)
    assert rig.got == [5, 6, 7]


def test_a_gap_is_read_from_the_record() -> None:
    rig = Rig(Record([5, 6, 7, 8]))
    rig.tell(0, 5)
    rig.tell(3, 8)
    assert (rig.got, rig.record.reads) == ([5, 6, 7, 8], 1)


def test_quiet_reads_the_record_and_sees_the_end() -> None:
    rig = Rig(Record([5, 6], "FINISHED"))
    rig.record.answer = replace(rig.record.answer, finish_reason="stop")
    rig.step()
    assert rig.record.reads == 0
    rig.now = QUIET_S
    rig.step()
    assert (rig.got, rig.finish_reason) == ([5, 6], "stop")


@pytest.mark.parametrize(
    ("state", "error"), [("FAILED", RequestFailed), ("EXPIRED", RequestExpired), ("ABORTED", RequestAborted)]
)
def test_an_end_without_success_is_an_error_that_says_why(state: str, error: type[Exception]) -> None:
    by_event, by_record = Rig(), Rig(Record([5], state))
    with pytest.raises(Ended) as caught:
        by_event.tell(0, state=state, error_code="pull_failed", error_detail="node d1")
    assert isinstance(caught.value.error, error)
    assert "pull_failed: node d1" in str(caught.value.error)
    by_record.record.answer = replace(by_record.record.answer, error_code="pull_failed")
    by_record.now = QUIET_S
    with pytest.raises(Ended) as caught:
        by_record.step()
    assert isinstance(caught.value.error, error)
    assert "pull_failed" in str(caught.value.error)


def test_a_vanished_record_is_an_error() -> None:
    rig = Rig()
    rig.record.answer = replace(rig.record.answer, status=ReadStatus.UNKNOWN)
    rig.now = QUIET_S
    with pytest.raises(Ended) as caught:
        rig.step()
    assert isinstance(caught.value.error, ServiceUnavailable)


def test_other_tokens_at_known_indexes_are_never_spliced() -> None:
    rig = Rig()
    rig.tell(0, 5, 6)
    with pytest.raises(Ended, match="different_tokens"):
        rig.tell(1, 9, 7)


def test_after_a_rollback_the_answer_goes_on_if_the_ledger_repeats_it() -> None:
    rig = Rig()
    rig.tell(0, 5, 6, 7)
    rig.record.tokens = (5,)
    rig.mailbox.put(None)
    rig.step()
    rig.tell(1, 6)
    rig.tell(2, 7)
    rig.tell(3, 8, state="FINISHED", finish_reason="stop")
    assert (rig.got, rig.finish_reason) == ([5, 6, 7, 8], "stop")


def test_after_a_rollback_another_answer_is_an_error_even_if_its_events_are_lost() -> None:
    rig = Rig()
    rig.tell(0, 5, 6, 7)
    rig.record.tokens = (5,)
    rig.mailbox.put(None)
    rig.step()
    rig.record.tokens = (5, 9, 9, 9)
    rig.now = 2 * QUIET_S
    with pytest.raises(Ended, match="different_tokens"):
        rig.step()


def test_after_a_rollback_a_shorter_end_is_an_error() -> None:
    rig = Rig()
    rig.tell(0, 5, 6, 7)
    rig.record.tokens = (5,)
    rig.mailbox.put(None)
    rig.step()
    with pytest.raises(Ended, match="different_tokens"):
        rig.tell(1, 6, state="FINISHED", finish_reason="stop")


def test_a_short_outage_is_waited_for_and_a_long_one_told() -> None:
    rig = Rig()
    rig.record.away = True
    rig.now = QUIET_S
    rig.step()
    rig.now += OUTAGE_S - 1
    rig.step()
    rig.record.away = False
    rig.now += QUIET_S
    rig.step()
    rig.record.away = True
    rig.now += QUIET_S
    rig.step()
    rig.now += OUTAGE_S
    with pytest.raises(ServiceUnavailable):
        rig.step()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_any_loss_doubling_and_order_of_events_gives_the_same_answer(answer: list[int], data: st.DataObject) -> None:
    rig = Rig(Record(answer, "FINISHED"))
    rig.record.answer = replace(rig.record.answer, finish_reason="stop")
    events = [(i, answer[i : i + n]) for i in range(len(answer)) for n in (1, 2)]
    for index, tokens in data.draw(st.lists(st.sampled_from(events), max_size=20)):
        rig.mailbox.put(Event("u", index, tuple(tokens)))
    while rig.finish_reason is None:
        rig.now += QUIET_S / 4
        rig.step()
    assert rig.got == answer
