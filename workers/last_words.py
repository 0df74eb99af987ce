"""What a node that cannot go on tells the ledger before its process ends, so that nobody waits for its silence."""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import LedgerError
from app.ledger import Ledger
from app.protocol.commands import (
    Answer,
    Bell,
    Command,
    Drain,
    FailAnswer,
    FailAttempt,
    FailStatus,
    FailureKind,
    Heartbeat,
    HeldClaim,
    HeldLease,
    Holdings,
    HoldingsAnswer,
    ReportExit,
)
from app.protocol.tables import FailureReason
from app.schemas import Gauges


def say_last_words(ledger: Ledger, incarnation: str, gauges: Gauges, why: str, moving: str | None) -> list[Bell]:
    """Say that the node is unhealthy, hand back what it holds, and leave for good. Returns the bells to ring for it.

    ``moving``: lease id or fence of the handoff in which the mover is stuck or has died. That one has failed; nothing
    else is to blame, and it is handed back uncounted. None if it was something else: then it is a node's loss, which
    counts for what was in the running step. The ledger knows what that is, even if no thread of this node moves.

    No block is freed by this: whoever still writes into one goes on until the process ends (rule 5). What it would
    say of it meets another fence.

    Raises:
        LedgerError: what was not said here, the supervisor says, or the node's silence.
    """
    *_, holdings = ledger.execute_many(goodbye(incarnation, gauges, moving))
    fails = hand_back(incarnation, holdings, why, moving)
    bells = bells_for(fails, ledger.execute_many(fails) if fails else [])
    more = True
    while more:
        left = ledger.execute(ReportExit(incarnation))
        bells += left.bells
        more = left.more
    return bells


def goodbye(incarnation: str, gauges: Gauges, moving: str | None) -> tuple[Command, ...]:
    """Unhealthy; and, if it was the mover, gets nothing more, and what it holds from now on.

    Not otherwise: a node that hears that it drains hands back uncounted what is stuck in its step.
    """
    unhealthy = Heartbeat(incarnation, gauges)
    return (unhealthy,) if moving is None else (unhealthy, Drain(incarnation), Holdings(incarnation))


def hand_back(
    incarnation: str, holdings: Answer | LedgerError, why: str, moving: str | None
) -> tuple[FailAttempt, ...]:
    """What to say of each handoff, if it was the mover, and if the ledger said what there is."""
    if moving is None or not isinstance(holdings, HoldingsAnswer):
        return ()
    return tuple(_hand_back(incarnation, one, why, moving) for one in (*holdings.claims, *holdings.leases))


def bells_for(fails: Sequence[FailAttempt], answers: Sequence[Answer | LedgerError]) -> list[Bell]:
    """For what is QUEUED again."""
    return [
        Bell("prefill", fail.uid, answer.attempt)
        for fail, answer in zip(fails, answers, strict=True)
        if isinstance(answer, FailAnswer) and answer.status is FailStatus.REQUEUED
    ]


def _hand_back(incarnation: str, held: HeldClaim | HeldLease, why: str, moving: str) -> FailAttempt:
    lease_id = held.lease_id if isinstance(held, HeldLease) else ""
    blamed = moving == (lease_id or held.fence)
    kind = FailureKind.FAILURE if blamed else FailureKind.OVERLOAD
    reason = FailureReason.PULL_FAILED if blamed else FailureReason.HANDED_BACK
    return FailAttempt(held.uid, held.attempt, held.fence, incarnation, lease_id, kind, reason, why)
