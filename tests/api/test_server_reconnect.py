"""Connections that break, over a real server and ledger: the same key gets the whole answer, computed once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from app.protocol.commands import AbortStatus, Cluster, Detach, Snapshot, Watcher
from tests.api.keyed import KEY, TEXT, Held, joined
from tests.api.server import StartWeb, Web, body
from tests.api.support import Send, Wait, ids, say
from tests.waiting import wait_for

R1 = {**KEY, "X-Request-Id": "r1"}


def is_unwatched(web: Web) -> bool:
    """Whether nobody watches r1 and its grace runs. Asked by taking a watcher away that it never had."""
    uid = web.ledger.execute(Snapshot(client_id="r1")).uid
    return web.ledger.execute(Detach(uid, Watcher("nobody", "none"))).status is AbortStatus.GRACE


@pytest.mark.parametrize("goes", ["client", "web process"])
def test_a_broken_stream_is_taken_up_again_from_its_start(start_web: StartWeb, goes: str) -> None:
    held = Held()
    web = start_web(held)
    with httpx.stream("POST", f"{web.url}/v1/completions", json=body(stream=True), headers=R1, timeout=20) as answer:
        lines = answer.iter_lines()
        assert '"G"' in next(lines)
        if goes == "web process":
            (process,) = web.gunicorn_workers()
            process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
    wait_for(lambda: is_unwatched(web), 5)
    wait_for(lambda: web.http.get("/ready").status_code == 200, 20)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(web.http.post, "/v1/completions", json=body(stream=True), headers=R1)
        wait_for(lambda: not is_unwatched(web))
        held.go_on.set()
        assert joined(again.result().text) == TEXT
    assert again.result().headers["Idempotent-Replayed"] == "true"
    assert len(held.seen) == 1


def test_the_official_clients_own_retries_get_the_first_requests_answer(start_web: StartWeb) -> None:
    held = Held()
    web = start_web(held)
    client = web.client(max_retries=3, timeout=0.7)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.completions.create, model="toy", prompt="hi", max_tokens=50, extra_headers=R1)
        wait_for(lambda: " attached " in web.log.read_text(), 10)
        held.go_on.set()
        assert answer.result().choices[0].text == TEXT
    assert answer.result().id == "cmpl-r1"
    assert len(held.seen) == 1


def test_of_twenty_at_once_one_is_admitted_and_the_replay_is_the_same_to_the_byte(start_web: StartWeb) -> None:
    held = Held()
    web = start_web(held)

    def ask() -> httpx.Response:
        return httpx.post(f"{web.url}/v1/completions", json=body(return_token_ids=True), headers=KEY, timeout=20)

    with ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(ask) for _ in range(20)]
        wait_for(lambda: web.log.read_text().count(" attached ") == 19, 10)
        held.go_on.set()
        answers = [future.result() for future in futures]
    assert len({answer.content for answer in [*answers, ask()]}) == 1
    assert answers[0].json()["choices"][0]["text"] == TEXT
    assert len(held.seen) == 1


def test_unwatched_past_its_grace_it_ends_and_its_blocks_come_back(start_web: StartWeb) -> None:
    web = start_web(lambda work: [Send(ids("a")), Wait(threading.Event())], BATON_IDEMPOTENCY_GRACE_S="0.5")
    with httpx.stream("POST", f"{web.url}/v1/completions", json=body(stream=True), headers=R1, timeout=20) as answer:
        next(answer.iter_raw())
    wait_for(lambda: web.state("r1") == "ABORTED", 10)
    assert not [lease for lease in web.ledger.execute(Cluster()).leases if lease.state == "ACTIVE"]
    assert web.worker is not None
    web.worker.script = lambda work: say("again")
    again = web.http.post("/v1/completions", json=body(stream=True), headers=R1)
    assert joined(again.text) == "again"
    assert "Idempotent-Replayed" not in again.headers
