"""A pull that is given wrong bytes: always caught, counted as a failure of the attempt, and retried."""

from __future__ import annotations

import pytest

from tests.chaos.clients import GREEDY, Stream, greedy
from tests.chaos.records import PREFIX
from tests.chaos.stack import Stack
from workers.failpoints.orders import Action, Order, Point

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.matrix, pytest.mark.timeout(240)]

TOKENS = 8
SERVICE_S = 60.0


@pytest.mark.parametrize(
    ("action", "seen"),
    [
        pytest.param(Action.CORRUPT, "digest ", marks=pytest.mark.short),
        (Action.SWAPPED, "digest "),
        (Action.SHORT, "bytes, its header says"),
        pytest.param(Action.FOREIGN, "is not that pool: it belongs to", marks=pytest.mark.short),
    ],
)
def test_wrong_bytes_are_caught_counted_and_the_attempt_retried(stack: Stack, action: Action, seen: str) -> None:
    canaries = stack.canaries()
    request_id = stack.name("victim")
    stack.arm(Order(point=Point.SEALED, role="prefill", action=action, request_id=request_id))
    victim = Stream(stack.baton, request_id, greedy(6, TOKENS)).start()
    stack.wait_taken(action, SERVICE_S)
    for stream in (victim, *(canary for canary, _ in canaries)):
        assert stream.ended.wait(SERVICE_S), f"{stream.request_id} hangs"
    assert victim.exact, victim.error
    assert victim.token_ids == GREEDY[6]["output_ids"][:TOKENS]
    record = stack.baton.get(f"/v1/requests/{request_id}")[1]
    assert (record["attempt"], record["failures"]) == (2, 1)
    why = str(stack.redis.hget(f"{PREFIX}rec:{record['uid']}", "last_failure"))
    assert why.startswith("pull_failed: ")
    assert seen in why
    for canary, expected in canaries:
        assert canary.exact, canary.error
        assert canary.answer() == expected
    stack.serve_more()
    stack.wait_baseline()
