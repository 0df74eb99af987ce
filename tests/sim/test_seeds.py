"""Whole clusters under faults: no promise is broken, and the faults are there."""

from __future__ import annotations

import pytest

from app.protocol.messages import Refusal
from app.protocol.tables import FailureReason
from tests.sim.disasters import Disaster
from tests.sim.faults import Fault
from tests.sim.scenario import Kind
from tests.sim.soak import Total, run_seeds

SEEDS = 300
RARE: dict[Kind, int] = {
    Fault.MESSAGE_MANGLED: 60,
    Disaster.NODE_DRAINS: 120,
    Fault.MESSAGE_LOST: 120,
    Fault.KV_CORRUPTED: 40,
}
"""Kinds that run alone too, in so many seeds: what comes of them is seldom seen among all the others."""
CANNOT_OCCUR = {
    # An attempt draws each token once; of tokens that an earlier one has drawn otherwise only web can tell.
    FailureReason.DIFFERENT_TOKENS,
}

OF_OTHER_RELEASES = {Refusal.VERSION}
"""All nodes of these clusters are of one release."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def total() -> Total:
    return run_seeds(range(SEEDS))


@pytest.fixture(scope="module")
def with_rare(total: Total) -> Total:
    both = Total()
    for part in (total, *(run_seeds(range(count), [kind]) for kind, count in RARE.items())):
        both.add(part)
    return both


def test_no_seed_breaks_a_promise(total: Total) -> None:
    assert total.seeds == SEEDS
    assert total.failed == [], "python -m tests.sim.replay SEED shows what happened to the request"


def test_no_seed_of_a_rare_kind_breaks_a_promise(with_rare: Total) -> None:
    assert with_rare.failed == []


@pytest.mark.parametrize("kind", [*Fault, *Disaster])
def test_every_kind_of_fault_strikes(total: Total, kind: str) -> None:
    assert total.counts[kind]


@pytest.mark.parametrize("reason", sorted(set(FailureReason) - CANNOT_OCCUR))
def test_attempts_end_for_every_reason(with_rare: Total, reason: FailureReason) -> None:
    assert with_rare.counts[f"attempt ended: {reason}"]


@pytest.mark.parametrize("reason", sorted({reason for reason in Refusal if reason} - OF_OTHER_RELEASES))
def test_messages_are_refused_for_every_reason(with_rare: Total, reason: Refusal) -> None:
    assert with_rare.counts[f"refused: {reason}"]


@pytest.mark.parametrize("what", ["prompt found in the cache", "cached block shared", "cached block evicted"])
def test_the_prefix_cache_is_used(total: Total, what: str) -> None:
    assert total.counts[what] > 50


def test_cached_blocks_go_bad_and_are_found_out_before_anybody_starts_from_them(with_rare: Total) -> None:
    assert with_rare.counts["cached block corrupted"] > with_rare.counts["corrupted block dropped"] > 10


def test_every_outcome_occurs_and_most_requests_finish(total: Total) -> None:
    expected = {
        "finished",
        "request_failed",
        "request_expired",
        "request_cancelled",
        "service_unavailable",
        "duplicate_request",
        "idempotency_key_reused",
        "queue_full",
        "context_length_exceeded",
        "left",
        "connection lost",
        "connection refused",
    }
    assert expected <= total.outcomes.keys()
    assert total.counts["attached"]
    assert total.outcomes["finished"] > total.outcomes.total() / 2
