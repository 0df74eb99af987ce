"""Sixteen streams lose their decode nodes in the middle, all at once."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.clients import GREEDY, Stream, greedy, sampled, undisturbed
from tests.chaos.stack import Stack
from tests.chaos.table import NOTES
from tests.waiting import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.matrix, pytest.mark.short, pytest.mark.timeout(300)]

TOKENS = 48
UNDER_WAY = 6
CASES = (1, 2, 3, 4, 5, 6, 2, 4)
"""References that go on for so long."""
SERVICE_S = 180.0


def test_sixteen_streams_greedy_and_sampled_go_on_token_by_token_when_their_decode_nodes_are_killed(
    stack: Stack,
) -> None:
    requests = [greedy(case, TOKENS) for case in CASES]
    requests += [sampled(case, 100 + number, TOKENS) for number, case in enumerate(CASES)]
    with ThreadPoolExecutor(len(requests)) as pool:
        expected = list(pool.map(lambda one: undisturbed(stack.baton, one), requests))
    for case, answer in zip(CASES, expected, strict=False):
        assert answer.token_ids == GREEDY[case]["output_ids"][:TOKENS]
    streams = [Stream(stack.baton, stack.name("stream"), request).start() for request in requests]
    wait_for(lambda: all(len(stream.token_ids) >= UNDER_WAY for stream in streams), 120, "they do not get under way")
    nodes = stack.baton.nodes()
    killed_at = time.monotonic()
    for name in ("decode1", "decode2"):
        os.kill(nodes[name]["pid"], signal.SIGKILL)
    cut_short = [stream for stream in streams if len(stream.token_ids) < TOKENS]
    assert len(cut_short) == len(streams), "killed too late to show anything"
    for stream, answer in zip(streams, expected, strict=True):
        assert stream.ended.wait(SERVICE_S), f"{stream.request_id} hangs"
        assert stream.exact, stream.error
        assert stream.answer() == answer
    waits = sorted(stream.time_to_next(killed_at) for stream in streams)
    NOTES.append(f"{len(waits)} streams: next token {waits[0]:.2f} to {waits[-1]:.2f} s after the kill")
    stack.serve_more()
    stack.wait_baseline()
