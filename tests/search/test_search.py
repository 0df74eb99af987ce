"""Every state that small clusters can get into, and that each of them comes to rest within a bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.ledger.memory import attempts, ends, ledger
from app.ledger.memory.state import Store
from app.protocol.commands import Emit
from app.protocol.holding import Holding
from tests.search.configuration import Configuration, Fault, Request
from tests.search.search import Search

FIRST = Request("u1", (11, 12))
ABORTED = replace(FIRST, may_be_aborted=True)
AGAIN = Request("u2", (21, 22), after="u1")
"""The same client id with another prompt, once the first request has ended."""
TWO = (Request("u1", (11, 12), client_id="a"), Request("u2", (21, 22), client_id="b"))

CONFIGURATIONS = [
    Configuration("an abort at any moment, then the same id with another prompt", (ABORTED, AGAIN)),
    Configuration("one fault of any kind", (FIRST,), faults=1),
    Configuration("one fault of any kind and an abort", (ABORTED,), faults=1),
    Configuration("two lost messages", (FIRST,), faults=2, kinds=frozenset({Fault.MESSAGE_LOST})),
    Configuration("two crashes", (FIRST,), faults=2, kinds=frozenset({Fault.CRASH_REPORTED})),
    Configuration(
        "a lost message, an abort, another prompt", (ABORTED, AGAIN), faults=1, kinds=frozenset({Fault.MESSAGE_LOST})
    ),
    Configuration("two requests and a place on each of two decode nodes", TWO, decode=2, prefill_blocks=2),
]
MOST_STATES = 200_000
REST_MOST_MS = 10_000
"""No state of these is further from rest, by the timeouts of ``configuration``."""


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_no_state_breaks_a_promise_and_each_comes_to_rest(configuration: Configuration) -> None:
    result = Search(configuration).run(MOST_STATES)
    assert result.violation == "", "\n".join(map(str, result.path))
    assert result.exhausted, f"more than {MOST_STATES} states"
    assert result.at_rest > 0
    assert result.longest_ms <= REST_MOST_MS
    print(f"{configuration.name}: {result.states} states, {result.transitions} transitions")


def found(*kinds: Fault, faults: int = 1) -> str:
    """The violation that a search with these faults finds."""
    return (
        Search(Configuration("sabotaged", (FIRST,), faults=faults, kinds=frozenset(kinds))).run(MOST_STATES).violation
    )


def test_a_lease_that_outlives_its_attempt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "close_lease", lambda store, record, unused: None)
    assert "is too much" in found(faults=0)


def test_an_emission_that_anybody_may_make_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(store: Store, command: Emit) -> Any:
        record = store.records.get(command.uid)
        if record is not None:
            command = replace(command, attempt=record.attempt, fence=record.fence, incarnation=record.owner)
        return attempts.emit(store, command)

    monkeypatch.setitem(ledger._HANDLERS, Emit, emit)
    assert found(Fault.FREEZE) != ""


@pytest.mark.parametrize("fault", [Fault.ROLLBACK, Fault.FREEZE])
def test_a_comparison_in_one_direction_only_is_found(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(Holding, "_let_go", lambda self, key: None)
    assert found(fault) == "it never comes to rest"
