"""What nodes do while the ledger does not answer: they ask again, and run no further ahead than they may."""

from __future__ import annotations

import pytest

from app.protocol.commands import Activate, Claim, Emit, ReserveNext
from tests.unit.protocol.cluster import Cluster, reference
from tests.unit.protocol.rest import finish

PROMPT = (5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize("command", [Claim, ReserveNext, Emit, Activate])
@pytest.mark.parametrize("fault", ["lost", "unanswered"])
def test_an_unknown_outcome_is_asked_again_until_it_is_known(command: type, fault: str) -> None:
    cluster = Cluster()
    faults = iter([fault, fault])
    cluster.ledger_fault = lambda asked: next(faults, "") if isinstance(asked, command) else ""
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(PROMPT, 10)
    assert (record.attempt, record.failures) == (1, 0)


def test_a_ledger_that_is_away_pauses_the_sequence_and_loses_no_token() -> None:
    cluster = Cluster()
    prompt = next((n, 3) for n in range(1, 200) if len(reference((n, 3), 40)) == 40)
    uid = cluster.submit(prompt, 40)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 3)
    away_until = cluster.now + 4
    cluster.ledger_fault = lambda asked: "lost" if cluster.now < away_until else ""
    cluster.run(limit_s=3.5)
    lease = next(iter(cluster.runners["d0"].machine.table.values()))
    assert len(lease.output) <= 3 + 2 + 6 + 1, "it paused at its bound"
    finish(cluster, uid)
    assert cluster.snapshot(uid).output_ids == reference(prompt, 40)
