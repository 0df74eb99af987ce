"""A call that cannot be prepared: the address comes from a peer's message, and may be anything."""

from __future__ import annotations

import queue

import pytest

from app.link import CallOutcome, Link
from app.protocol.messages import ACCEPTED, Message, PullResult
from app.versions import SPOKEN
from tests.integration.test_link import never

RESULT = PullResult(uid="u", attempt=1, fence="f", lease_id="l", activated=True)


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "no-such://1"])
def test_a_call_to_what_is_no_address_was_certainly_not_sent_and_the_next_one_works(address: str) -> None:
    def called(call_id: str, message: Message) -> None:
        peer.reply(call_id, ACCEPTED)

    peer = Link("peer", "127.0.0.1", called, never)
    peer.version = SPOKEN.newest
    caller = Link("caller", "127.0.0.1", lambda call_id, message: None, never)
    caller.version = SPOKEN.newest
    outcomes: queue.Queue[CallOutcome] = queue.Queue()
    try:
        caller.call(address, "peer", RESULT, 0.5, outcomes.put)
        outcome = outcomes.get(timeout=5)
        assert (outcome.reply, outcome.not_sent) == (None, True)
        assert address in outcome.detail
        caller.call(peer.address, "peer", RESULT, 5.0, outcomes.put)
        assert outcomes.get(timeout=10).reply == ACCEPTED
    finally:
        caller.close()
        peer.close()
