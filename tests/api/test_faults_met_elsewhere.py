"""Faults that other systems showed at their API: wrong ends, wrong health, leaks of those that go, unlike errors."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from app.protocol.commands import Cluster, Heartbeat, Register, ReportExit, Work
from app.schemas import Gauges, NodeInfo, Role
from tests.api.conftest import MakeRig, Rig, chunks
from tests.api.keyed import records
from tests.api.server import StartWeb, Web, body
from tests.api.support import IM_END, Fail, Send, Step, Wait, ids, say
from tests.api.test_surface import LedgerGate, error_of
from tests.waiting import wait_for


def start_node(rig: Rig, name: str, role: Role, ttl_ms: int = 60_000) -> None:
    """A node that says once that it is healthy; it counts as alive for ``ttl_ms``."""
    rig.ledger.execute(
        Register(NodeInfo(incarnation=name, role=role, name=name, pid=1, host="h", model="toy-1"), ttl_ms)
    )
    rig.ledger.execute(Heartbeat(name, Gauges()))


def ready(rig: Rig) -> tuple[int, Any]:
    answer = rig.get("/ready")
    return answer.status_code, answer.json["reasons"]  # type: ignore[index]


def nodes(rig: Rig) -> dict[str, str]:
    listed: Any = rig.get("/cluster").json
    return {node["name"]: node["health"] for node in listed["nodes"] if node["role"] != "web"}


def scan_no_more(rig: Rig) -> None:
    """Nodes that are silent stay listed."""
    ledger: Any = rig.ledger
    ledger.store.scanned = 10**15


def test_one_silent_node_of_two_makes_neither_the_service_nor_its_peers_unhealthy(make_rig: MakeRig) -> None:
    rig = make_rig(script=None)
    scan_no_more(rig)
    start_node(rig, "p1", "prefill")
    start_node(rig, "d1", "decode")
    start_node(rig, "p2", "prefill", ttl_ms=1)
    wait_for(lambda: nodes(rig) == {"p1": "healthy", "d1": "healthy", "p2": "stale"})
    assert ready(rig) == (200, [])


def test_readiness_goes_with_the_last_node_of_a_role_and_comes_back_with_the_next(make_rig: MakeRig) -> None:
    rig = make_rig(script=None)
    scan_no_more(rig)
    start_node(rig, "p1", "prefill")
    start_node(rig, "d1", "decode")
    assert ready(rig) == (200, [])
    rig.ledger.execute(ReportExit("d1"))
    assert ready(rig) == (503, ["no healthy decode node"])
    assert rig.get("/health").status_code == 200, "this process is not at fault"
    start_node(rig, "d2", "decode", ttl_ms=1)
    wait_for(lambda: ready(rig) == (503, ["no healthy decode node (stale)"]))
    start_node(rig, "d3", "decode")
    assert ready(rig) == (200, [])


def test_an_answer_that_ends_with_its_first_token_has_its_last_chunk_and_its_usage(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send([IM_END], "stop")])
    whole: Any = rig.chat().json
    assert (whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]) == ("", "stop")
    *streamed, usage, done = chunks(rig.chat(stream=True, stream_options={"include_usage": True}).text)
    assert [chunk["choices"][0]["finish_reason"] for chunk in streamed] == [None, "stop"]
    assert (usage["usage"], done) == (whole["usage"], "[DONE]")
    assert usage["usage"]["completion_tokens"] == 1


def test_a_duplicate_is_found_before_anything_is_queued(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    def script(work: Work) -> Iterator[Step]:
        yield Wait(go_on)
        yield from say("unharmed")

    rig = make_rig(script=script)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(rig.complete("same")))
    thread.start()
    rig.wait_state("same", "PREFILLING")
    with caplog.at_level(logging.CRITICAL):
        for number in range(20):
            error_of(rig.complete("same", prompt=f"another {number}"), 409, "duplicate_request")
    ledger: Any = rig.ledger
    assert [record.client_id for record in records(rig)] == ["same"]
    assert (ledger.store.seq, len(ledger.store.queue)) == (1, 0)
    go_on.set()
    thread.join()
    assert answers[0].json["choices"][0]["text"] == "unharmed"
    rig.services.bells.close()  # rings what waits
    assert len(rig.bells.rung) == 1
    rig.check_all_given_back()


def _draining(make_rig: MakeRig) -> Rig:
    rig = make_rig()
    rig.services.process.begin_drain(0)
    return rig


def _away(make_rig: MakeRig) -> Rig:
    gate = LedgerGate()
    rig = make_rig(wrap=gate.around)
    gate.closed = True
    return rig


ENDS: dict[str, tuple[Callable[[MakeRig], Rig], dict[str, Any]]] = {
    "request_failed": (lambda make: make(script=lambda work: [Fail("pull_failed", "digest")]), {}),
    "draining": (_draining, {}),
    "ledger away": (_away, {}),
    "invalid_value": (lambda make: make(), {"temperature": "hot"}),
    "context_length_exceeded": (lambda make: make(), {"max_tokens": 100_000}),
    "model_not_found": (lambda make: make(), {"model": "other"}),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_error_is_the_same_whether_the_answer_was_to_be_streamed_or_not(make_rig: MakeRig, end: str) -> None:
    arrange, fields = ENDS[end]
    rig = arrange(make_rig)
    try:
        whole, streamed = (rig.complete("r1", stream=stream, **fields) for stream in (False, True))
    finally:
        rig.services.process.drain_deadline = float("inf")
    assert whole.status_code == streamed.status_code >= 400
    assert whole.json == streamed.json
    for header in ("x-should-retry", "Retry-After", "Content-Type"):
        assert whole.headers.get(header) == streamed.headers.get(header)


def test_an_error_after_the_first_token_is_the_one_that_a_whole_answer_gets(make_rig: MakeRig) -> None:
    rig = make_rig(script=lambda work: [Send(ids("a")), Fail("pull_failed", "digest")])
    whole = rig.complete("r1")
    *_, last = chunks(rig.complete("r1", stream=True).text)
    assert last == whole.json
    assert last["error"]["code"] == "request_failed"


def test_five_hundred_that_connect_ask_and_go_leave_nothing(start_web: StartWeb) -> None:
    pause = threading.Event()

    def slowly(work: Work) -> Iterator[Step]:
        for _ in range(400):
            pause.wait(0.05)
            yield Send(ids("a"))
        yield Send([IM_END], "stop")

    web = start_web(slowly)
    (process,) = web.gunicorn_workers()
    web.http.close()
    wait_for(lambda: open_connections(web, process) == 0, 10)
    data = json.dumps(body(stream=True, max_tokens=500)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for number in range(500):
        with socket.create_connection(("127.0.0.1", httpx.URL(web.url).port or 0), timeout=10) as client:
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            if number % 20 == 0:
                client.recv(1)
    wait_for(lambda: open_connections(web, process) == 0, 10)
    wait_for(lambda: in_process(web) == 0, 10)
    assert web.log.read_text().count(" admitted ") > 100
    assert web.worker is not None
    web.worker.script = lambda work: say("next")
    assert httpx.post(f"{web.url}/v1/completions", json=body(), timeout=10).json()["choices"][0]["text"] == "next"


def open_connections(web: Web, process: psutil.Process) -> int:
    """Of clients to the port of this web process, in whatever state it holds them."""
    port = httpx.URL(web.url).port
    held = process.net_connections("tcp")
    return sum(one.status != psutil.CONN_LISTEN and one.laddr.port == port for one in held)


def in_process(web: Web) -> int:
    """Requests that wait, compute or decode, and answers that are open."""
    cluster = web.ledger.execute(Cluster())
    running = sum(node.gauges.running for node in cluster.nodes if node.node.role == "web")
    return int(cluster.queued + cluster.waiting_for_grant + len(cluster.leases) + running)
