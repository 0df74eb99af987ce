"""Which faults are nobody's failure, and which must not even cost an attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.disasters import Disaster
from tests.sim.faults import Fault

if TYPE_CHECKING:
    from tests.sim.scenario import Scenario

_NODE_DISASTERS = (
    Disaster.NODE_CRASHES,
    Disaster.NODE_FREEZES,
    Disaster.NODE_DRAINS,
    Disaster.ENGINE_STUCK,
    Disaster.MOVER_STUCK,
    Disaster.LINK_CUT,
    Disaster.NODE_CUT,
    Disaster.BROKER_RESTARTS,
)

HARMLESS: frozenset[str] = frozenset(
    {
        Fault.BELL_LOST,
        Fault.BELL_DOUBLED,
        Fault.BELL_LATE,
        Fault.EVENT_LOST,
        Fault.EVENT_DOUBLED,
        Fault.EVENT_LATE,
        Fault.BEAT_LOST,
        Fault.BEAT_DOUBLED,
        Fault.MESSAGE_DOUBLED,
        Disaster.WEB_CRASHES,
        Disaster.WEB_FREEZES,
        Disaster.CONTROL_CRASHES,
        Disaster.BEAT_DIES,
        Disaster.BROKER_RESTARTS,
        Disaster.CLOCK_STEPS,
        Disaster.CLOCK_STOPS,
    }
)
"""Where only these occur, every request ends in its first attempt."""

BLAMELESS: frozenset[str] = HARMLESS | {
    Fault.LEDGER_CALL_LOST,
    Fault.LEDGER_REPLY_LOST,
    Fault.LEDGER_CALL_LATE,
    Fault.LEDGER_REPLY_CUT_SHORT,
    Disaster.NODE_DRAINS,
    Disaster.LEDGER_FREEZES,
    Disaster.LEDGER_RESTARTS,
    Disaster.LEDGER_ROLLS_BACK,
    Disaster.LEDGER_READ_ONLY,
}
"""Where only these occur, no attempt counts as a failure: the ledger's silence and a drain are nobody's fault."""

NODES_ONLY: frozenset[str] = frozenset(
    {*(kind for kind in Fault if not kind.startswith(("ledger", "beat"))), *_NODE_DISASTERS}
)
"""Ledger, beat and control work as they should: what a dead node held is taken over on time."""

SERVED: frozenset[str] = frozenset(
    {
        "finished",
        "left",
        "request_cancelled",
        "duplicate_request",
        "idempotency_key_reused",
        "queue_full",
        "context_length_exceeded",
    }
)
"""What a client gets where nothing keeps it from its answer: that, or what it has asked for itself."""

_FOR_AN_OLDER_ONE = ("grant_timeout: ", "preempted: ", "commit_refused: handed_back", "grant_refused: handed_back")
"""How the failure of an attempt begins that gave its room to an older request; the last two where the peer says it
first."""


_FORGOTTEN_END = {Disaster.NODE_DRAINS, Disaster.LEDGER_ROLLS_BACK}
"""A node that left in order, and a ledger that has forgotten what it had finished before: for the ledger it is lost."""


def may_count(scenario: Scenario) -> bool:
    """Whether an attempt of this scenario may count as a failure."""
    return not _only(scenario, BLAMELESS) or _struck(scenario) >= _FORGOTTEN_END


def may_cost(scenario: Scenario, failure: str) -> bool:
    """Whether a fault of this scenario may cost an attempt; ``failure``: reason and detail."""
    return failure.startswith(_FOR_AN_OLDER_ONE) or not _only(scenario, HARMLESS)


def must_serve(scenario: Scenario) -> bool:
    """Whether nothing of this scenario keeps a client from its answer."""
    return _only(scenario, HARMLESS - {Disaster.WEB_CRASHES, Disaster.WEB_FREEZES})


def only_nodes(scenario: Scenario) -> bool:
    """Whether nothing but nodes and the ways between them goes wrong."""
    return _struck(scenario) <= NODES_ONLY


def _only(scenario: Scenario, kinds: frozenset[str]) -> bool:
    if scenario.times.first_token_timeout_s < 60.0:
        return False  # so short that load alone may use it up
    return _struck(scenario) <= kinds


def _struck(scenario: Scenario) -> set[str]:
    return {*scenario.rates, *(kind for _, kind in scenario.disasters)}
