"""Web as it runs: gunicorn, a real ledger, the official client, closed connections, signals."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from app.protocol.commands import Cluster
from tests.api.conftest import chunks
from tests.api.server import HI, StartWeb, Web, body
from tests.api.support import IM_END, Fail, Send, Wait, ids, say
from tests.waiting import wait_for


def test_the_official_client_reads_every_kind_of_answer(start_web: StartWeb) -> None:
    client = start_web(lambda work: say("Grüße!")).client()
    assert [m.id for m in client.models.list()] == ["toy"]
    whole = client.chat.completions.create(model="toy", messages=HI)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Grüße!", "stop")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9

    options: Any = {"include_usage": True}
    stream = list(client.chat.completions.create(model="toy", messages=HI, stream=True, stream_options=options))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == "Grüße!"
    assert stream[-2].choices[0].finish_reason == "stop"
    assert stream[-1].usage == whole.usage
    assert len({c.id for c in stream}) == 1

    completion = client.completions.create(model="toy", prompt="hi", extra_body={"return_token_ids": True})
    assert completion.choices[0].text == "Grüße!"
    assert completion.choices[0].token_ids == [*ids("Grüße!"), IM_END]  # type: ignore[attr-defined]
    pieces = list(client.completions.create(model="toy", prompt="hi", stream=True))
    assert "".join(c.choices[0].text for c in pieces) == "Grüße!"


def test_the_official_client_raises_its_own_errors_and_retries_only_what_it_should(start_web: StartWeb) -> None:
    web = start_web(lambda work: [Send(ids("a")), Fail("engine_error")])
    client = web.client(max_retries=2)
    with pytest.raises(openai.NotFoundError, match="model"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="toy", prompt="x", temperature=7)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.InternalServerError, match="engine_error"):
        client.completions.create(model="toy", prompt="x")
    with pytest.raises(openai.APIError, match="engine_error"):
        list(client.completions.create(model="toy", prompt="x", stream=True))
    assert web.log.read_text().count(" admitted ") == 2


def test_each_token_is_sent_at_once(start_web: StartWeb) -> None:
    go_on = threading.Event()
    web = start_web(lambda work: [Send(ids("a")), Wait(go_on), Send([IM_END], "stop")])
    with web.http.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
        lines = answer.iter_lines()
        assert '"a"' in next(lines)
        go_on.set()
        assert "data: [DONE]" in list(lines)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_before_the_first_token_is_noticed(start_web: StartWeb, stream: bool) -> None:
    web = start_web(lambda work: [Wait(threading.Event())])
    with pytest.raises(httpx.ReadTimeout):
        web.http.post("/v1/completions", json=body(stream=stream), headers={"X-Request-Id": "r1"}, timeout=0.5)
    wait_for(lambda: web.state("r1") == "ABORTED", 2.5)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_in_the_middle_is_noticed(start_web: StartWeb, stream: bool) -> None:
    pace = threading.Event()
    tokens = [step for _ in range(100) for step in (Send(ids("a")), Wait(pace))]
    web = start_web(lambda work: tokens)
    client = httpx.Client(base_url=web.url)
    request = client.build_request("POST", "/v1/completions", json=body(stream=stream), headers={"X-Request-Id": "r1"})
    if stream:
        answer = client.send(request, stream=True)
        next(answer.iter_lines())
        answer.close()
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.send(
                client.build_request(
                    "POST", "/v1/completions", json=body(), headers={"X-Request-Id": "r1"}, timeout=0.5
                )
            )
        assert web.state("r1") in ("DECODING", "ABORTED")
    client.close()
    wait_for(lambda: web.state("r1") == "ABORTED", 2.5)


def test_sigterm_lets_an_open_answer_finish_and_takes_no_new_one(start_web: StartWeb) -> None:
    go_on = threading.Event()
    web = start_web(lambda work: [Send(ids("a")), Wait(go_on), Send([IM_END], "stop")], BATON_DRAIN_TIMEOUT_S="20")
    with web.http.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        web.process.send_signal(signal.SIGTERM)
        wait_for(lambda: refused(web.url))
        go_on.set()
        assert "data: [DONE]" in list(lines)
    assert web.process.wait(15) == 0


def test_sigterm_ends_what_does_not_finish_with_an_explicit_error(start_web: StartWeb) -> None:
    web = start_web(lambda work: [Send(ids("a")), Wait(threading.Event())], BATON_DRAIN_TIMEOUT_S="1")
    headers = {"X-Request-Id": "r1"}
    with web.http.stream("POST", "/v1/completions", json=body(stream=True), headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        asked_at = time.monotonic()
        web.process.send_signal(signal.SIGTERM)
        *_, last = chunks("\n".join(lines).strip() + "\n\n")
    assert last["error"]["code"] == "service_unavailable"
    assert web.process.wait(15) == 0
    assert time.monotonic() - asked_at < 5
    assert web.state("r1") == "ABORTED"


def test_a_killed_web_worker_leaves_the_ledger_at_once_and_is_replaced(start_web: StartWeb) -> None:
    web = start_web(lambda work: [Send(ids("a")), Wait(threading.Event())], BATON_NODE_TTL_S="60")
    (before,) = web_nodes(web)
    with web.http.stream("POST", "/v1/completions", json=body(stream=True), headers={"X-Request-Id": "r1"}) as answer:
        lines = answer.iter_lines()
        next(lines)
        (process,) = web.gunicorn_workers()
        process.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    wait_for(lambda: web.state("r1") == "ABORTED", 3)
    wait_for(lambda: web_nodes(web) and before not in web_nodes(web), 10)
    assert web.worker is not None
    web.worker.script = lambda work: say("again")
    answer = httpx.post(f"{web.url}/v1/completions", json=body(), timeout=10)
    assert answer.json()["choices"][0]["text"] == "again"


def test_many_streams_at_once_and_health_beside_them(start_web: StartWeb) -> None:
    go_on = threading.Event()
    web = start_web(lambda work: [Wait(go_on), *say("x" * 20)], BATON_WEB_THREADS="40")
    texts: list[str] = []

    def ask() -> None:
        answer = httpx.post(f"{web.url}/v1/completions", json=body(stream=True), timeout=30)
        texts.append("".join(c["choices"][0]["text"] for c in chunks(answer.text)[:-1]))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    wait_for(lambda: web_gauge(web) == 40, 10)
    assert web.http.get("/health").status_code == 200
    assert web.http.post("/v1/completions", json=body()).status_code == 429
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert texts == ["x" * 20] * 40


def raw(web: Web, sent: bytes) -> bytes:
    """Everything that comes back for ``sent`` until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", httpx.URL(web.url).port or 0), timeout=30) as client:
        client.sendall(sent)
        received = b""
        while part := client.recv(65536):
            received += part
    return received


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_a_body_in_broken_chunks_is_the_clients_fault(start_web: StartWeb) -> None:
    web = start_web(lambda work: say("x"))
    answer = raw(web, HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "internal_error" not in web.log.read_text()


def drip(web: Web, begun: bytes) -> bytes:
    """What comes back for a request of which a byte follows now and then, so that no silence is too long."""
    ended = threading.Event()
    with socket.create_connection(("127.0.0.1", httpx.URL(web.url).port or 0), timeout=30) as client:
        client.sendall(begun)

        def go_on() -> None:
            while not ended.wait(0.5):
                try:
                    client.sendall(b"x")
                except OSError:
                    return

        dripping = threading.Thread(target=go_on)
        dripping.start()
        try:
            return client.recv(65536)
        except ConnectionResetError:
            return b""
        finally:
            ended.set()
            dripping.join()


def test_requests_that_never_come_to_their_end_are_given_up_with_an_error_and_keep_no_connection(
    start_web: StartWeb,
) -> None:
    """A body that stops in the middle; a body and a head that go on for ever."""
    web = start_web(lambda work: say("x"))
    with ThreadPoolExecutor(3) as pool:
        stops = pool.submit(raw, web, HEAD + b"Content-Length: 100\r\n\r\n{")
        dripping = [pool.submit(drip, web, begun) for begun in (HEAD + b"Content-Length: 400\r\n\r\n{", HEAD[:40])]
    answer = stops.result()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in answer.replace(b" ", b"")
    for first in (future.result() for future in dripping):
        assert first == b"" or first.startswith(b"HTTP/1.1 408 "), "a reset may overtake what it is told"
    assert web.http.get("/health").status_code == 200


def test_a_head_that_is_not_here_does_not_hold_up_the_end_of_a_web_worker(start_web: StartWeb) -> None:
    web = start_web(lambda work: say("x"))
    with socket.create_connection(("127.0.0.1", httpx.URL(web.url).port or 0), timeout=30) as client:
        client.sendall(HEAD)
        assert web.http.get("/health").status_code == 200  # its head has begun to be read by now
        web.process.send_signal(signal.SIGTERM)
        assert client.recv(1) == b""
        assert web.process.wait(20) == 0
    assert "Traceback" not in web.log.read_text()


def test_a_web_worker_ends_with_its_killed_arbiter_in_the_middle_of_an_answer(start_web: StartWeb) -> None:
    web = start_web(lambda work: [Send(ids("a")), Wait(threading.Event())])
    worker = psutil.Process(web.process.pid).children()[0]
    with httpx.stream("POST", f"{web.url}/v1/completions", json=body(stream=True), timeout=30) as answer:
        next(answer.iter_raw())
        web.process.kill()
        _, alive = psutil.wait_procs([worker], timeout=5)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_gunicorn_leaves_nothing_in_the_home_folder(start_web: StartWeb) -> None:
    web = start_web()
    assert web.http.get("/health").status_code == 200
    assert list(web.home.rglob("*")) == []


def web_nodes(web: Web) -> list[str]:
    return [n.node.incarnation for n in web.ledger.execute(Cluster()).nodes if n.node.role == "web"]


def web_gauge(web: Web) -> int:
    return next(int(n.gauges.running) for n in web.ledger.execute(Cluster()).nodes if n.node.role == "web")


def refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=1)
    except httpx.ConnectError:
        return True
    return False
