"""The exit of a web worker, told to the ledger by a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import LedgerUnavailable
from app.ledger.memory import MemoryLedger
from app.protocol.commands import Register
from app.schemas import NodeInfo
from web.report_exit import main


class Book(MemoryLedger):
    """Knows the web worker ``w``; it can be out of reach."""

    def __init__(self) -> None:
        super().__init__(lambda: 1_000_000)
        self.away = self.closed = False
        self.execute(Register(NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h"), 60_000))

    def apply(self, command: Any, not_after_ms: int) -> Any:
        if self.away:
            raise LedgerUnavailable("out of reach")
        return super().apply(command, not_after_ms)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Book:
    made = Book()
    monkeypatch.setattr("web.report_exit.connect", lambda _: made)
    return made


def test_a_web_worker_that_has_ended_is_in_the_ledger_no_more(book: Book) -> None:
    main("w")
    assert "w" not in book.store.nodes
    assert book.closed


def test_a_ledger_that_is_away_leaves_it_to_the_heartbeat_and_breaks_nothing(book: Book) -> None:
    book.away = True
    main("w")
    assert "w" in book.store.nodes
    assert book.closed
