"""Far more than the decode nodes can hold: everything is preempted some time, and all of it ends as it should."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.sim.crowd import draw_crowd
from tests.sim.disasters import Disaster
from tests.sim.faults import Fault
from tests.sim.model import BLOCK_TOKENS
from tests.sim.run import Result, run_scenario
from tests.sim.scenario import Kind

SEEDS = 30
PREEMPTED = "attempt ended: preempted"

pytestmark = pytest.mark.timeout(900)


def run_crowds(only: Sequence[Kind] | None) -> list[Result]:
    results = [run_scenario(draw_crowd(seed, only)) for seed in range(SEEDS)]
    assert [(result.seed, result.violation) for result in results if result.violation] == []
    assert sum(result.counts[PREEMPTED] for result in results) > 5 * SEEDS, "too few to say anything"
    return results


def test_without_a_fault_all_finish_token_exactly_and_nobody_goes_in_circles() -> None:
    for result in run_crowds(()):
        wishes = draw_crowd(result.seed, ()).wishes
        assert set(result.outcomes) == {"finished"}, "a canary for each pair of nodes too"
        assert result.outcomes["finished"] > len(wishes)
        filled = sum(wish.sampling.max_tokens for wish in wishes) / BLOCK_TOKENS
        assert result.counts[PREEMPTED] <= filled / 2, "each is paid for by blocks that were filled meanwhile"


@pytest.mark.parametrize(
    "only",
    [
        (Disaster.NODE_CRASHES, Disaster.NODE_DRAINS),
        (Disaster.LEDGER_ROLLS_BACK, Disaster.LEDGER_FREEZES),
        (Fault.MESSAGE_LOST, Fault.BELL_LOST, Fault.EVENT_LOST),
        None,
    ],
    ids=["nodes", "ledger", "ways", "all"],
)
def test_under_faults_no_promise_is_broken(only: Sequence[Kind] | None) -> None:
    run_crowds(only)
