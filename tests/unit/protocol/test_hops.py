"""A hop between prefill and decode that is refused ends the attempt at once, and the error names it."""

from __future__ import annotations

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.messages import Commit, Grant, Refusal, refused
from tests.unit.protocol.cluster import TICK, Cluster, Runner

PROMPT = (5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize("kind", [Grant, Commit])
def test_a_refused_hop_is_the_error_and_brings_the_blocks_back_at_once(kind: type) -> None:
    cluster = Cluster()
    deliver = cluster.deliver

    def late(sender: Runner, call: do.Call) -> None:
        if isinstance(call.message, kind):
            reply = refused(Refusal.EXPIRED, "read too late")
            cluster.after(TICK, lambda: sender.feed(on.CallEnded(call.tag, reply)))
        else:
            deliver(sender, call)

    cluster.deliver = late  # type: ignore[method-assign]
    cluster.run(limit_s=1)
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(cluster.ended(uid), 0.5)
    record = cluster.snapshot(uid)
    assert (record.error_code, record.error_detail) == (
        f"{kind.__name__.lower()}_refused",
        "expired read too late",
    )
    cluster.run(cluster.at_baseline, 1.5)
