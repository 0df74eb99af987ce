"""Requests of several sequences under faults: each ends once, as one, and nothing of it stays anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from app.ledger.memory.state import Store
from tests.sim.disasters import Disaster
from tests.sim.faults import Fault
from tests.sim.groups import draw_groups
from tests.sim.run import Result, run_scenario
from tests.sim.scenario import Kind

SEEDS = 20

pytestmark = pytest.mark.timeout(900)


def run_groups(only: Sequence[Kind] | None, seeds: int = SEEDS) -> list[Result]:
    results = [run_scenario(draw_groups(seed, only)) for seed in range(seeds)]
    assert [(result.seed, result.violation) for result in results if result.violation] == []
    return results


def test_without_a_fault_each_choice_is_answered_token_exactly() -> None:
    outcomes: Counter[str] = Counter()
    for result in run_groups(()):
        outcomes += result.outcomes
    assert outcomes["finished"] > outcomes.total() / 2
    assert outcomes["request_failed"] == 0


@pytest.mark.parametrize(
    "only",
    [
        (Disaster.NODE_CRASHES, Disaster.WEB_CRASHES),
        (Disaster.LEDGER_ROLLS_BACK, Fault.LEDGER_REPLY_LOST),
        None,
    ],
    ids=["processes", "ledger", "all"],
)
def test_under_faults_no_promise_is_broken(only: Sequence[Kind] | None) -> None:
    run_groups(only)


def test_sequences_that_go_on_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "group_of", lambda store, record: [record])
    violations = (run_scenario(draw_groups(seed)).violation for seed in range(20))
    assert "the group" in next(filter(None, violations), "")
