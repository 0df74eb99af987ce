"""Workers in which something stops moving among running answers: noticed, handed back, replaced; no false alarms."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.baton import START_S, Baton
from tests.integration.small import STALL_S, Small
from tests.integration.test_resume import GREEDY, LONG, Stream, assert_as_undisturbed, body, referenced

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.matrix, pytest.mark.timeout(200)]

TOLD_S = 2.5
"""After the stall: half a second until the next look, two for the last words."""


@pytest.fixture
def cluster(small: Small) -> Iterator[Small]:
    """Ready before, and ready with new incarnations where a test has ended some, after."""
    small.baton.wait_for(small.baton.is_ready, START_S)
    yield small
    small.baton.wait_for(small.baton.is_ready, START_S)
    small.wait_for_baseline()


def healths(baton: Baton, name: str) -> list[str]:
    """What ``/cluster`` says of each incarnation of a worker."""
    return [node["health"] for node in baton.get("/cluster")[1]["nodes"] if node["name"].startswith(name)]


def read(baton: Baton, pool: ThreadPoolExecutor, key: str, case: dict[str, Any], **more: Any) -> tuple[Stream, Any]:
    stream = Stream()
    return stream, pool.submit(stream.read, baton, key, body(case, **more))


@pytest.mark.short
def test_a_worker_that_is_stuck_in_a_step_says_so_hands_back_and_is_replaced(cluster: Small) -> None:
    baton = cluster.baton
    with ThreadPoolExecutor(1) as pool:
        stream, reading = read(baton, pool, "stuck-step", GREEDY[2])
        assert stream.started.wait(60)
        cluster.sabotage("decode1", "stuck-step")
        broken_at = time.monotonic()
        assert baton.get("/health")[0] == 200
        baton.wait_for(lambda: baton.get("/v1/requests/stuck-step")[1]["attempt"] == 2, STALL_S + TOLD_S + 1)
        assert time.monotonic() - broken_at >= STALL_S
        assert "healthy" not in healths(baton, "decode1")
        status, ready = baton.get("/ready")
        assert (status, len(ready["reasons"])) == (503, 1)
        assert ready["reasons"][0].startswith("no healthy decode node")
        assert baton.get("/health") == (200, baton.get("/health")[1]), "that a peer is unhealthy is not web's illness"
        baton.wait_for(lambda: baton.printed("decode1 ended (exit status 70)"), TOLD_S)
        reading.result(timeout=120)
    assert_as_undisturbed(baton, "stuck-step", stream, GREEDY[2]["prompt_ids"], referenced(GREEDY[2]))
    assert baton.get("/v1/requests/stuck-step")[1]["failures"] == 1
    log = baton.log("decode1").read_text()
    assert "part=engine: TimeoutError: no progress" in log
    assert "in stuck_step" in log, "it tells where the thread stands"


@pytest.mark.short
def test_a_mover_that_dies_among_running_answers_costs_the_handoff_it_was_at_one_failure_and_the_others_none(
    cluster: Small,
) -> None:
    baton = cluster.baton
    with ThreadPoolExecutor(2) as pool:
        running, reading = read(baton, pool, "running", GREEDY[3])
        assert running.started.wait(60)
        cluster.sabotage("decode1", "dead-mover")
        pulled, pulling = read(baton, pool, "pulled", GREEDY[6])
        baton.wait_for(lambda: baton.printed("decode1 ended (exit status 70)"), 10)
        assert not reading.done(), "ended too early to show anything"
        reading.result(timeout=120)
        pulling.result(timeout=120)
    for key, stream, case, failures in (("running", running, GREEDY[3], 0), ("pulled", pulled, GREEDY[6], 1)):
        assert_as_undisturbed(baton, key, stream, case["prompt_ids"], referenced(case))
        assert baton.get(f"/v1/requests/{key}")[1]["failures"] == failures, key


@pytest.mark.short
def test_a_step_that_keeps_the_interpreter_to_itself_is_ended_all_the_same(cluster: Small) -> None:
    baton = cluster.baton
    cluster.sabotage("prefill1", "selfish-step")
    with ThreadPoolExecutor(1) as pool:
        stream, reading = read(baton, pool, "selfish", GREEDY[1])
        baton.wait_for(lambda: baton.printed("prefill1 ended (exit status 1)"), STALL_S + TOLD_S + 5)
        reading.result(timeout=120)
    assert_as_undisturbed(baton, "selfish", stream, GREEDY[1]["prompt_ids"], referenced(GREEDY[1]))


def test_a_prefill_that_takes_longer_than_the_stall_time_but_progresses_is_left_alone(cluster: Small) -> None:
    """Not of the short ones: no fault, and ``tests/unit/test_host.py`` shows the same of a host in a second."""
    baton = cluster.baton
    before = {name: node["incarnation"] for name, node in baton.nodes().items()}
    with ThreadPoolExecutor(1) as pool:
        stream, reading = read(baton, pool, "long", LONG[0], cache_salt="long")
        reading.result(timeout=120)
    assert stream.token_ids == LONG[0]["output_ids"]
    record = baton.get("/v1/requests/long")[1]
    took_ms = record["timeline"]["first_token"] - record["timeline"]["claimed"]
    assert took_ms > 1000 * STALL_S, "too fast to show anything"
    assert (record["attempt"], record["failures"]) == (1, 0)
    assert {name: node["incarnation"] for name, node in baton.nodes().items()} == before
