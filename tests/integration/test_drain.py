"""Workers that are drained, by SIGTERM and by request, while they serve: nothing is lost and nobody has failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.launcher.plan import SOURCE_ROOT
from tests.integration.baton import START_S, Baton
from tests.integration.test_resume import (
    GREEDY,
    LONG,
    SAMPLED,
    Expected,
    Stream,
    assert_as_undisturbed,
    body,
    node_of,
    referenced,
    undisturbed,
    wait_until_all_are_back,
)

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.matrix, pytest.mark.short, pytest.mark.timeout(300)]

DRAIN_S = 1.0


@pytest.fixture(scope="module")
def cluster(new_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    """Two of each, whose drain is short. What is silent is not dead for long: here only an exit ends a node."""
    folder = tmp_path_factory.mktemp("drain")
    options = ("--prefill", "2", "--decode", "2", "--num-blocks", "160", "--drain-timeout-s", str(DRAIN_S))
    baton = Baton(new_home(folder), folder / "output", *options, BATON_NODE_TTL_S="60", BATON_LINK_TIMEOUT_S="10")
    try:
        baton.wait_until_ready()
        yield baton
    finally:
        baton.stop()


def shown(baton: Baton, incarnation: str) -> dict[str, Any] | None:
    """The node as ``/cluster`` shows it, if it is in the registry."""
    nodes = baton.get("/cluster")[1]["nodes"]
    return next((node for node in nodes if node["incarnation"] == incarnation), None)


def exits(baton: Baton, name: str) -> list[str]:
    """How a child has ended, each time."""
    return re.findall(rf"^{name} ended \((.*)\)", baton.text, re.MULTILINE)


def assert_left(baton: Baton, node: dict[str, Any], exits_before: int, within_s: float) -> None:
    """It ends with status 0, its entry goes (long before its silence would be noticed), and its successor comes."""
    name = node["name"].split("@")[0]
    baton.wait_for(lambda: len(exits(baton, name)) > exits_before, within_s)
    assert exits(baton, name)[exits_before:] == ["exit status 0"]
    baton.wait_for(lambda: shown(baton, node["incarnation"]) is None, 2)
    assert not psutil.pid_exists(node["pid"])


def test_sigterm_to_a_decode_worker_in_mid_answer_hands_back_what_does_not_fit_and_loses_no_token(
    cluster: Baton,
) -> None:
    before = cluster.nodes()
    request = body(GREEDY[2], **SAMPLED, max_tokens=150)
    short = body(GREEDY[0])
    with ThreadPoolExecutor(2) as pool:
        expected = undisturbed(cluster, request)
        stream = Stream()
        reading = pool.submit(stream.read, cluster, "handed-back", request)
        assert stream.started.wait(60)
        name = node_of(cluster, "handed-back", "decode")
        past = len(exits(cluster, name))
        os.kill(before[name]["pid"], signal.SIGTERM)
        assert not reading.done(), "too late to show anything"
        assert undisturbed(cluster, short) == referenced(GREEDY[0])  # another node takes what comes now
        assert_left(cluster, before[name], past, DRAIN_S + 10)
        reading.result(timeout=120)
    assert_as_undisturbed(cluster, "handed-back", stream, request["prompt"], expected)
    record = cluster.get("/v1/requests/handed-back")[1]
    assert record["failures"] == 0
    assert record["nodes"]["decode"] != before[name]["name"]
    wait_until_all_are_back(cluster, before)


def test_sigterm_to_a_prefill_worker_in_mid_transfer_waits_for_the_pull(cluster: Baton) -> None:
    before = cluster.nodes()
    decodes = [psutil.Process(before[name]["pid"]) for name in ("decode1", "decode2")]
    request = body(LONG[0], max_tokens=48)
    undisturbed(cluster, request)  # both have met
    with ThreadPoolExecutor(1) as pool:
        for number in range(5):
            stream, request_id = Stream(), f"in-transfer-{number}"
            reading = pool.submit(stream.read, cluster, request_id, request)
            name = freeze_in_transfer(cluster, request_id, decodes)
            past = len(exits(cluster, name)) if name else 0
            try:
                if name:
                    os.kill(before[name]["pid"], signal.SIGTERM)
                    cluster.wait_for(lambda name=name: is_draining(cluster, before[name]["incarnation"]), 5)  # type: ignore[misc]
                    assert cluster.get(f"/v1/requests/{request_id}")[1]["state"] == "PREFILLING"
                    assert exits(cluster, name)[past:] == [], "it did not wait for the pull"
            finally:
                for process in decodes:
                    process.resume()
            if name:
                break
            reading.result(timeout=120)
        assert name, "never stopped in the middle of a transfer"
        assert_left(cluster, before[name], past, 20)
        reading.result(timeout=120)
    expected = Expected(LONG[0]["output_ids"], LONG[0]["text"], LONG[0]["finish"])
    assert_as_undisturbed(cluster, request_id, stream, request["prompt"], expected, attempt=1)
    wait_until_all_are_back(cluster, before)


def freeze_in_transfer(cluster: Baton, request_id: str, decodes: list[psutil.Process]) -> str:
    """Freeze the decode workers when the prompt is computed and not yet pulled. The prefill node's name; empty: missed.

    The log of the prefill worker says when; the record, which is read after that, whether it was soon enough.
    """
    logs = {name: cluster.log(name) for name in ("prefill1", "prefill2")}
    mark = f"request_id={request_id} "
    deadline, pause = time.monotonic() + 60, threading.Event()
    while not pause.wait(0.005):
        for name, log in logs.items():
            if any(line.split(" prefilled ")[1:] and mark in line for line in log.read_text().splitlines()):
                for process in decodes:
                    process.suspend()
                record = cluster.get(f"/v1/requests/{request_id}")[1]
                return name if record["state"] == "PREFILLING" else ""
        assert time.monotonic() < deadline
    return ""


def is_draining(cluster: Baton, incarnation: str) -> bool:
    node = shown(cluster, incarnation)
    return node is not None and node["health"] == "draining"


def test_a_node_is_drained_by_request_and_then_stops_at_once(cluster: Baton) -> None:
    before = cluster.nodes()
    status, _, answer = cluster.post("/cluster/nodes/decode7/drain", {})
    assert (status, answer["error"]["code"]) == (404, "node_not_found")
    status, _, answer = cluster.post("/cluster/nodes/decode1/drain", {})
    assert (status, answer["incarnation"]) == (200, before["decode1"]["incarnation"])
    command = [sys.executable, "-m", "app.cli", "drain", "prefill1", "--wait", "--port", str(cluster.port)]
    told = subprocess.run(command, cwd=SOURCE_ROOT, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == f"{before['prefill1']['name']}: drained, 0 running, 0 waiting\n"
    cluster.wait_for(lambda: (shown(cluster, before["decode1"]["incarnation"]) or {})["health"] == "drained", 5)
    assert cluster.is_ready()
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda number: undisturbed(cluster, body(GREEDY[number])), range(5)))
    assert answers == [referenced(GREEDY[number]) for number in range(5)]
    for name in ("decode1", "prefill1"):
        node = shown(cluster, before[name]["incarnation"])
        assert node is not None
        assert (node["health"], node["sequences"]) == ("drained", {"running": 0, "waiting": 0})
        past = len(exits(cluster, name))
        os.kill(node["pid"], signal.SIGTERM)
        assert_left(cluster, node, past, 5)
    wait_until_all_are_back(cluster, before)
    assert cluster.get("/ready")[0] == 200


def test_a_drain_of_nothing_says_why_in_one_line(cluster: Baton) -> None:
    command = [sys.executable, "-m", "app.cli", "drain", "decode7", "--port", str(cluster.port)]
    told = subprocess.run(command, cwd=SOURCE_ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert told.stderr.startswith("baton: no living node is called decode7; there are: decode1@")
    assert told.stderr.count("\n") == 1


def test_no_request_ever_went_wrong_here(cluster: Baton) -> None:
    """The last of this file: a drain is nobody's failure, and no hop between two nodes broke."""
    cluster.wait_for(lambda: set(cluster.nodes()) >= {"prefill1", "decode1"}, START_S)
    logs = "".join(cluster.log(f"{role}{number}").read_text() for role in ("prefill", "decode") for number in (1, 2))
    reasons = set(re.findall(r"attempt failed .*?reason=(\w+)", logs))
    assert reasons <= {"draining"}
