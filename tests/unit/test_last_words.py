"""What a node says before it ends: whose failure its end is, and that nothing waits for its silence."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import LedgerUnavailable
from app.ledger.memory import MemoryLedger
from app.ledger.memory.state import PER_KIND
from app.protocol.commands import (
    Activate,
    Admit,
    Bell,
    Claim,
    ClaimStatus,
    Emit,
    Limits,
    Register,
    ReserveNext,
    ReserveStatus,
    Watcher,
)
from app.schemas import Gauges, NodeInfo, Role, SamplingParams
from workers.last_words import say_last_words

SICK = Gauges(health="unhealthy")
WHY = "p@h is unhealthy: mover: no progress for 120 s"


class Book(MemoryLedger):
    """Web ``w``, prefill ``p`` and decode ``d``, all alive."""

    def __init__(self) -> None:
        super().__init__(lambda: 1_000_000)
        self.node("w", "web")
        self.node("p", "prefill")
        self.node("d", "decode")

    def node(self, incarnation: str, role: Role) -> None:
        info = NodeInfo(incarnation=incarnation, role=role, name=incarnation, pid=1, host="h", num_blocks=9)
        self.execute(Register(info, 60_000))

    def claimed(self, uid: str, *, stamped: bool) -> None:
        limits = Limits(3, 1000, 60_000, 60_000, 60_000)
        self.execute(Admit(uid, uid, (5, 6), SamplingParams(seed=1, max_tokens=4), Watcher("w", uid), limits))
        assert self.execute(Claim(uid, "p", f"f-{uid}", 9, 16, stamp=stamped)).status is ClaimStatus.CLAIMED

    def reserved(self, uid: str) -> None:
        self.claimed(uid, stamped=False)
        assert self.execute(ReserveNext(uid, "d", f"l-{uid}", 9, 16)).status is ReserveStatus.RESERVED

    def decoding(self, uid: str) -> None:
        self.reserved(uid)
        self.execute(Emit(uid, 1, f"f-{uid}", "p", 0, (7,)))
        self.execute(Activate(uid, 1, f"f-{uid}", f"l-{uid}", "d", 0, 7))

    def fate(self, uid: str) -> tuple[str, int, int]:
        """State, attempt, failures."""
        record = self.store.records[uid]
        return record.state.value, record.attempt, record.failures


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_stuck_prefill_step_is_the_failure_of_what_is_stamped_into_it_only(book: Book) -> None:
    book.claimed("stamped", stamped=True)
    book.claimed("in line", stamped=False)
    bells = say_last_words(book, "p", SICK, WHY, None)
    assert book.fate("stamped") == ("QUEUED", 2, 1)
    assert book.fate("in line") == ("QUEUED", 2, 0)
    assert set(bells) == {Bell("prefill", "stamped", 2), Bell("prefill", "in line", 2)}


def test_a_stuck_seal_is_the_failure_of_its_own_handoff_only(book: Book) -> None:
    book.claimed("sealed", stamped=True)
    book.claimed("stamped", stamped=True)
    bells = say_last_words(book, "p", SICK, WHY, "f-sealed")
    assert book.fate("sealed") == ("QUEUED", 2, 1)
    assert book.store.records["sealed"].last_failure == f"pull_failed: {WHY}"
    assert book.fate("stamped") == ("QUEUED", 2, 0)
    assert set(bells) == {Bell("prefill", "sealed", 2), Bell("prefill", "stamped", 2)}


def test_a_stuck_pull_is_not_the_failure_of_the_answers_that_are_running(book: Book) -> None:
    book.decoding("running")
    book.reserved("pulled")
    say_last_words(book, "d", SICK, WHY, "l-pulled")
    assert book.fate("running") == ("QUEUED", 2, 0)
    assert book.store.records["running"].tokens == [7]
    assert book.fate("pulled") == ("QUEUED", 2, 1)
    assert book.store.leases["l-running"].state.value == "RELEASED"
    assert book.store.leases["l-pulled"].state.value == "CANCELLED"


def test_of_a_pull_that_has_been_given_up_meanwhile_nothing_is_left_to_blame(book: Book) -> None:
    book.decoding("running")
    say_last_words(book, "d", SICK, WHY, "l-long-gone")
    assert book.fate("running") == ("QUEUED", 2, 0)


@pytest.mark.parametrize("moving", [None, "f-0"])
def test_everything_goes_back_however_much_it_is_and_the_node_gets_nothing_more(book: Book, moving: str | None) -> None:
    count = 2 * PER_KIND + 1
    for number in range(count):
        book.claimed(str(number), stamped=False)
    bells = say_last_words(book, "p", SICK, WHY, moving)
    assert len(bells) == count
    assert {book.fate(str(number))[:2] for number in range(count)} == {("QUEUED", 2)}
    assert "p" not in book.store.nodes
    assert book.execute(Claim("0", "p", "f-new", 9, 16)).status is ClaimStatus.REFUSED


def test_a_node_that_the_ledger_does_not_know_leaves_all_the_same(book: Book) -> None:
    assert say_last_words(book, "stranger", SICK, WHY, "f") == []


def test_a_ledger_that_is_away_is_said(book: Book) -> None:
    class Away(Book):
        def apply(self, command: Any, not_after_ms: int) -> Any:
            raise LedgerUnavailable("out of reach")

        def node(self, incarnation: str, role: Role) -> None:
            pass

    with pytest.raises(LedgerUnavailable):
        say_last_words(Away(), "p", SICK, WHY, None)
