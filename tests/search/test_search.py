"""Every state that small clusters can get into, and that each of them comes to rest within a bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.ledger.memory import attempts, ends, ledger
from app.ledger.memory.state import Store
from app.protocol.commands import Emit
from app.protocol.holding import Holding
from app.protocol.prefill import compute
from app.protocol.prefill.attempt import Attempt
from tests.search.bisimulation import same_behaviour
from tests.search.commuting import conflicts
from tests.search.configuration import Configuration, Fault
from tests.search.configurations import (
    ABORT_AGAIN,
    ALIKE_ABORTED,
    ALL_LATE,
    ANY_FAULT,
    FIRST,
    REST_MOST_MS,
    SMALL,
    TWO_DECODE,
)
from tests.search.draft import Cluster
from tests.search.search import Search

MOST_STATES = 200_000


@pytest.mark.parametrize("configuration", SMALL, ids=lambda configuration: configuration.name)
def test_no_state_breaks_a_promise_and_each_comes_to_rest(configuration: Configuration) -> None:
    result = Search(configuration).run(MOST_STATES)
    assert result.violation == "", "\n".join(map(str, result.path))
    assert result.exhausted, f"more than {MOST_STATES} states"
    assert result.at_rest > 0
    assert result.longest_ms <= REST_MOST_MS


@pytest.mark.parametrize("configuration", [ANY_FAULT, TWO_DECODE], ids=lambda configuration: configuration.name)
def test_what_a_search_does_promptly_could_as_well_have_waited(configuration: Configuration) -> None:
    search = Search(configuration, Cluster(configuration, merges=False))
    search.run(MOST_STATES)
    assert search.prompt.quiet
    found = conflicts(search.cluster.processes, search.prompt.quiet)
    assert not found, found[0]


@pytest.mark.parametrize(
    "configuration", [ABORT_AGAIN, ALL_LATE, ALIKE_ABORTED], ids=lambda configuration: configuration.name
)
def test_states_that_a_search_takes_for_one_behave_alike(configuration: Configuration) -> None:
    assert same_behaviour(Search(configuration, Cluster(configuration, merges=False)), Search(configuration))


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


def test_a_prefix_cache_that_finds_what_is_still_computed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    start = compute.Computing._start

    def publish_at_once(self: compute.Computing, fence: str, attempt: Attempt) -> None:
        start(self, fence, attempt)
        for block, key in zip(attempt.blocks, attempt.keys, strict=False):
            if key not in self.pool._block_of:
                self.pool._key[block], self.pool._block_of[key] = key, block

    monkeypatch.setattr(compute.Computing, "_start", publish_at_once)
    assert Search(ALIKE_ABORTED).run(MOST_STATES).violation != ""


@pytest.mark.parametrize("fault", [Fault.ROLLBACK, Fault.FREEZE])
def test_a_comparison_in_one_direction_only_is_found(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(Holding, "_let_go", lambda self, key: None)
    assert found(fault) == "it never comes to rest"
