"""Model tests: whatever happens, in whatever order, no promise is broken after any step; and all of it did happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from app.ledger.memory import ends
from app.protocol.decode import Phase as DecodePhase
from app.protocol.prefill import Phase as PrefillPhase
from tests.model.__main__ import RUN, Broken, explore
from tests.model.carrier_rules import COMMANDS, USUAL_COMMANDS
from tests.model.chosen import LATE_CALL, LATE_REPLY, LOST_CALL, LOST_REPLY
from tests.model.machine import MACHINES, OneOfEach, Protocol
from tests.model.mishaps import ROLLBACK
from tests.model.parcels import Parcel
from tests.sim.invariants import Violation

NAMES = [machine.__name__ for machine in MACHINES]

pytestmark = pytest.mark.timeout(900)  # a failure takes up to five minutes to shrink; a run without one, some seconds


@pytest.fixture(scope="module")
def explorations() -> Iterator[dict[str, Future[Counter[str]]]]:
    """All at once: Ctrl-C, which their processes hear too, leaves none to begin."""
    with ThreadPoolExecutor(len(NAMES)) as pool:
        yield {name: pool.submit(explore, name) for name in NAMES}


@pytest.mark.parametrize("machine", NAMES)
def test_no_order_of_steps_and_faults_breaks_a_promise(
    explorations: dict[str, Future[Counter[str]]], machine: str
) -> None:
    explorations[machine].result()


@pytest.fixture(scope="module")
def tally(explorations: dict[str, Future[Counter[str]]]) -> Counter[str]:
    """What happened in all runs of all machines."""
    try:
        return sum((each.result() for each in explorations.values()), Counter())
    except Broken:
        pytest.skip("a promise is broken, and the exploration ended there")


def test_every_rule_acted_often(tally: Counter[str]) -> None:
    rules = [rule.function.__name__ for rule in Protocol.setup_state().rules]
    assert len(rules) > 40
    assert {name: tally[f"rule {name}"] for name in rules if tally[f"rule {name}"] < 20} == {}


def test_nodes_were_struck_in_every_phase_of_a_handoff(tally: Counter[str]) -> None:
    moments = [f"prefill {phase}" for phase in (*PrefillPhase, "ending")]
    moments += [f"decode {phase}" for phase in (*DecodePhase, "ending")]
    assert [moment for moment in moments if not tally[f"crash {moment}"] + tally[f"freeze {moment}"]] == []


def test_every_parcel_was_struck_and_the_usual_ones_in_every_way(tally: Counter[str]) -> None:
    ways = {parcel: [tally[f"{how}: {parcel}"] for how in ("lost", "late", "doubled")] for parcel in Parcel}
    assert [parcel for parcel, times in ways.items() if not any(times)] == []
    usual = set(Parcel) - {Parcel.ACTIVATING}
    assert {parcel: times for parcel, times in ways.items() if parcel in usual and not all(times)} == {}


def test_every_ledger_call_was_struck_and_the_usual_ones_in_every_way(tally: Counter[str]) -> None:
    kinds = (LOST_CALL, LATE_CALL, LOST_REPLY)
    assert [name for name in COMMANDS if not any(tally[f"{how}: {name}"] for how in kinds)] == []
    usual = [f"{how}: {name}" for name in USUAL_COMMANDS for how in (*kinds, LATE_REPLY)]
    assert [name for name in usual if not tally[name]] == []


def test_requests_finished_failed_and_came_again(tally: Counter[str]) -> None:
    assert tally["finished"] > 3 * tally["runs"]
    assert tally["requests that were tried again"] > tally["runs"] / 4
    for state in ("FAILED", "ABORTED", "EXPIRED"):
        assert tally[f"state {state}"] > 10, state
    for reason in ("node_lost", "pull_failed", "grant_unacknowledged", "commit_unacknowledged", "first_token_timeout"):
        assert tally[f"attempt ended: {reason}"] > 10, reason
    assert min(tally[ROLLBACK], tally["attached"], tally["duplicate_request"], tally["ends: drained"]) > 10


def test_a_lease_that_outlives_its_attempt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "close_lease", lambda store, record, unused: None)

    class Sabotaged(OneOfEach):
        tally: ClassVar[Counter[str]] = Counter()

    with pytest.raises(Violation, match="lease"):
        run_state_machine_as_test(Sabotaged, settings=settings(RUN, max_examples=50, phases=(Phase.generate,)))
