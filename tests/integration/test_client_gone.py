"""A client that closes its connection, at each stage of its request: noticed, work stopped, blocks back."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.baton import START_S, Baton
from tests.integration.small import NUM_BLOCKS, Small
from tests.integration.test_resume import LONG, MODEL

pytestmark = [pytest.mark.model, pytest.mark.matrix, pytest.mark.short, pytest.mark.timeout(120)]

NOTICED_S = 10.0
PROMPT: list[int] = LONG[0]["prompt_ids"]
"""600 tokens: a second one does not fit beside it."""
numbers = itertools.count()


@pytest.fixture
def cluster(small: Small) -> Iterator[Small]:
    """At rest before and after."""
    small.baton.wait_for(small.baton.is_ready, START_S)
    small.wait_for_baseline()
    yield small
    small.wait_for_baseline()


@contextmanager
def asked(baton: Baton, prompt: list[int], max_tokens: int, *, stream: bool) -> Iterator[str]:
    """Send a request and hold its connection open, reading nothing; its id. Closes the connection at the end.

    All of its prompt is computed, whatever was before."""
    key = f"gone-{next(numbers)}"
    connection = http.client.HTTPConnection("127.0.0.1", baton.port, timeout=60)
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"stream": stream, "ignore_eos": True, "cache_salt": key}
    headers = {"content-type": "application/json", "x-request-id": key}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    try:
        yield key
    finally:
        connection.close()


def record(baton: Baton, key: str) -> dict[str, Any]:
    status, found = baton.get(f"/v1/requests/{key}")
    return found if status == 200 else {"state": "", "timeline": {}}


def loose_blocks(baton: Baton, name: str) -> int:
    """Blocks that nobody holds."""
    blocks = baton.nodes()[name]["blocks"]
    return int(blocks["free"] + blocks["cached"])


def is_at(baton: Baton, key: str, state: str) -> Callable[[], bool]:
    return lambda: bool(record(baton, key)["state"] == state)


def computed(baton: Baton, key: str) -> bool:
    """Prefill is done with it, and no decode node has room."""
    waits = record(baton, key)["state"] == "PREFILLING" and baton.get("/cluster")[1]["waiting_for_grant"] == 1
    node = baton.nodes().get("prefill1")
    return bool(waits and node and node["sequences"] == {"running": 0, "waiting": 1})


def expect_end(cluster: Small, key: str, what: str) -> None:
    """From the moment at which the client has gone."""
    gone_at = time.monotonic()
    cluster.baton.wait_for(is_at(cluster.baton, key, "ABORTED"), NOTICED_S)
    noticed_s = time.monotonic() - gone_at
    uid = record(cluster.baton, key)["uid"]

    def leases() -> list[str]:
        return [lease["uid"] for lease in cluster.baton.get("/cluster")[1]["leases"]]

    cluster.baton.wait_for(lambda: uid not in leases(), NOTICED_S)
    print(f"client gone while {what}: noticed after {noticed_s:.2f} s")


@pytest.mark.parametrize("stream", [True, False])
def test_while_its_request_is_queued(cluster: Small, stream: bool) -> None:
    baton = cluster.baton
    with asked(baton, PROMPT, 48, stream=True) as first:
        baton.wait_for(is_at(baton, first, "PREFILLING"), 30)
        with asked(baton, PROMPT, 48, stream=stream) as second:
            baton.wait_for(is_at(baton, second, "QUEUED"), 10)
        expect_end(cluster, second, "queued")
        assert record(baton, second)["attempt"] == 1
        assert "claimed" not in record(baton, second)["timeline"]


@pytest.mark.parametrize("stream", [True, False])
def test_while_its_prompt_is_computed_the_next_step_is_not_begun(cluster: Small, stream: bool) -> None:
    baton = cluster.baton
    with asked(baton, PROMPT, 48, stream=stream) as key:
        baton.wait_for(is_at(baton, key, "PREFILLING"), 30)
    expect_end(cluster, key, "prefilling")
    cluster.wait_for_baseline(NOTICED_S)
    assert "first_token" not in record(baton, key)["timeline"]
    computed_to_its_end = re.search(rf"prefilled .*request_id={key} ", baton.log("prefill1").read_text())
    assert not computed_to_its_end


@pytest.mark.parametrize("stream", [True, False])
def test_between_prefill_and_decode(cluster: Small, stream: bool) -> None:
    baton = cluster.baton
    with asked(baton, PROMPT, 400, stream=True) as first:
        baton.wait_for(is_at(baton, first, "DECODING"), 30)
        with asked(baton, PROMPT, 100, stream=stream) as second:
            baton.wait_for(lambda: computed(baton, second), 30)
        expect_end(cluster, second, "between prefill and decode")
        assert is_at(baton, first, "DECODING")(), "the decode node was full for all that time"
        baton.wait_for(lambda: loose_blocks(baton, "prefill1") == NUM_BLOCKS, NOTICED_S)


@pytest.mark.parametrize("stream", [True, False])
def test_while_its_answer_is_decoded(cluster: Small, stream: bool) -> None:
    baton = cluster.baton
    with asked(baton, PROMPT[:8], 900, stream=stream) as key:
        baton.wait_for(is_at(baton, key, "DECODING"), 30)
    expect_end(cluster, key, "decoding")
    cluster.wait_for_baseline(NOTICED_S)
