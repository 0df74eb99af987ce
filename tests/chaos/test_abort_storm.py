"""Hundreds of clients that give up in the middle of whatever their request is at, and what is left of it."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tests.chaos.clients import GREEDY, Stream, greedy
from tests.chaos.stack import Stack

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.matrix, pytest.mark.timeout(400)]

ROUNDS = 4
PER_ROUND = 300
AT_ONCE = 60
LONGEST_S = 1.5
"""What a prompt of 34 tokens takes when so many compute theirs: queued, prefilling, granted, pulling, decoding."""
LONG, TOKENS = 6, 8


def give_up(stack: Stack, request_id: str, after_s: float, how: str) -> None:
    """Send a request, and after a while close the connection or have the request cancelled."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.baton.port, timeout=60)
    try:
        headers = {"content-type": "application/json", "X-Request-Id": request_id}
        body = {**greedy(LONG, 64), "stream": True, "cache_salt": request_id}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        Event().wait(after_s)
        if how == "cancel":
            stack.baton.post(f"/v1/requests/{request_id}/cancel", {})
            connection.getresponse().read()
    finally:
        connection.close()


@pytest.mark.parametrize("number", range(ROUNDS))
def test_three_hundred_long_prompts_given_up_at_random_moments_leave_nothing(stack: Stack, number: int) -> None:
    chance = random.Random(number)
    plans = [
        (stack.name("given-up"), chance.uniform(0, LONGEST_S), chance.choice(("close", "cancel")))
        for _ in range(PER_ROUND)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda plan: give_up(stack, *plan), plans))
    streams = [Stream(stack.baton, stack.name("after"), greedy(LONG, TOKENS)).start() for _ in range(10)]
    for stream in streams:
        assert stream.ended.wait(60), f"{stream.request_id} hangs"
        assert stream.exact, stream.error
        assert stream.token_ids == GREEDY[LONG]["output_ids"][:TOKENS]
        record = stack.baton.get(f"/v1/requests/{stream.request_id}")[1]
        assert (record["attempt"], record["failures"]) == (1, 0)
    states = {stack.baton.get(f"/v1/requests/{request_id}")[1].get("state") for request_id, _, _ in plans}
    assert states <= {"ABORTED", "FINISHED", None}  # None: gone before it was admitted
    stack.note_usages()
