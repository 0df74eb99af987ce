"""gunicorn's workers replaced under load, as a rolling restart does it: one more comes, then the oldest goes."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.protocol.commands import Cluster
from app.schemas import NodeInfo
from app.versions import SPOKEN
from tests.api.conftest import chunks
from tests.api.server import ROOT, StartWeb, Web, body
from tests.api.support import IM_END, Send, Wait, ids, say
from tests.api.test_server import web_nodes
from tests.waiting import wait_for


def replace(web: Web, *, until_gone: bool = True) -> None:
    (old,) = web.gunicorn_workers()
    web.process.send_signal(signal.SIGTTIN)
    wait_for(lambda: len(web_nodes(web)) == 2, 20)
    web.process.send_signal(signal.SIGTTOU)
    if until_gone:
        wait_for(lambda: not old.is_running(), 20)


def ask_again_and_again(web: Web, keeps: bool, stop: threading.Event, outcomes: list[str]) -> None:
    port = httpx.URL(web.url).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    while not stop.is_set():
        try:
            connection.request("POST", "/v1/completions", json.dumps(body()), {"content-type": "application/json"})
            answer: Any = json.loads(connection.getresponse().read())
            outcomes.append("" if answer.get("choices", [{}])[0].get("text") == "hello" else str(answer))
        except (OSError, http.client.HTTPException) as error:
            outcomes.append(repr(error))
            connection.close()
        if not keeps:
            connection.close()
    connection.close()


def test_no_request_fails_while_the_web_worker_is_replaced(start_web: StartWeb) -> None:
    web = start_web()
    outcomes: list[str] = []
    stop = threading.Event()
    keeps = [False] * 4 + [True] * 4
    threads = [threading.Thread(target=ask_again_and_again, args=(web, keep, stop, outcomes)) for keep in keeps]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            seen = len(outcomes)
            replace(web)
            wait_for(lambda seen=seen: len(outcomes) > seen + 20, 20)  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [outcome for outcome in outcomes if outcome] == []


def test_an_open_answer_is_finished_by_the_worker_that_goes(start_web: StartWeb) -> None:
    go_on = threading.Event()
    web = start_web(lambda work: [Send(ids("a")), Wait(go_on), Send([IM_END], "stop")], BATON_DRAIN_TIMEOUT_S="20")
    with web.http.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        replace(web, until_gone=False)
        assert web.worker is not None
        web.worker.script = lambda work: say("new")
        assert httpx.post(f"{web.url}/v1/completions", json=body(), timeout=10).json()["choices"][0]["text"] == "new"
        go_on.set()
        assert "data: [DONE]" in list(lines)
    wait_for(lambda: len(web_nodes(web)) == 1, 10)


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGINT])
def test_a_quick_stop_ends_an_open_answer_with_an_explicit_error(start_web: StartWeb, number: signal.Signals) -> None:
    web = start_web(lambda work: [Send(ids("a")), Wait(threading.Event())], BATON_DRAIN_TIMEOUT_S="60")
    with web.http.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        web.process.send_signal(number)
        *_, last = chunks("\n".join(lines).strip() + "\n\n")
    assert last["error"]["code"] == "service_unavailable"
    assert web.process.wait(10) == 0, "long before its drain would be over"


def registered(web: Web) -> list[NodeInfo]:
    return [entry.node for entry in web.ledger.execute(Cluster()).nodes if entry.node.role == "web"]


def test_a_new_worker_is_of_the_release_that_is_there_when_it_starts(start_web: StartWeb, tmp_path: Path) -> None:
    root = tmp_path / "installed"
    for name in ("app", "web", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    web = start_web(root=root)
    versions = root / "app" / "versions.py"
    before, after = (f"newest={version}" for version in (SPOKEN.newest, SPOKEN.newest + 1))
    versions.write_text(versions.read_text().replace(before, after))
    web.process.send_signal(signal.SIGTTIN)
    newest = {SPOKEN.newest, SPOKEN.newest + 1}
    wait_for(lambda: {node.newest for node in registered(web)} == newest, 20)
    (old,) = [node for node in registered(web) if node.newest == SPOKEN.newest]
    web.process.send_signal(signal.SIGTTOU)  # the oldest
    wait_for(lambda: not psutil.pid_exists(old.pid), 20)
    wait_for(lambda: [node.newest for node in registered(web)] == [SPOKEN.newest + 1], 10)
    web.process.send_signal(signal.SIGTERM)  # a drain of what the new release has open
    assert web.process.wait(20) == 0
