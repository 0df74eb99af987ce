"""A draining node begins nothing, and gives back at once what it has not begun."""

from __future__ import annotations

import pytest

from app.protocol import events as on
from app.protocol.commands import Claim, Command, ReserveNext
from tests.unit.protocol.cluster import Cluster, reference

PROMPT = (5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize(("name", "question"), [("p0", Claim), ("d0", ReserveNext)])
def test_what_is_given_after_the_drain_began_is_done_by_another_node(name: str, question: type) -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)

    def drain_meanwhile(command: Command) -> str:
        if isinstance(command, question) and not cluster.runners[name].machine.draining:
            cluster.runners[name].feed(on.DrainAsked())
            cluster._add("prefill", "p1", 16, 8)
            cluster._add("decode", "d1", 16, 8)
        return ""

    cluster.ledger_fault = drain_meanwhile
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(cluster.ended(uid), 10)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 2, reference(PROMPT, 10))
    assert name not in (record.prefill_node, record.decode_node)


def test_a_computed_prompt_without_a_grant_is_handed_back_at_once() -> None:
    cluster = Cluster(decode=0)
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(limit_s=1.5)
    cluster.runners["p0"].feed(on.DrainAsked())
    cluster.run(limit_s=0.1)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.failures) == ("QUEUED", 2, 0)
    assert cluster.runners["p0"].machine.idle
