"""An app over the memory twin, and one that gunicorn serves, with a scripted worker in place of engines."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from app.ledger.api import Ledger
from app.ledger.memory import MemoryLedger
from app.settings import Settings, load_settings
from app.valkey import EmbeddedValkey
from tests.api.server import StartWeb, Web
from tests.api.support import HeardBells, Script, ScriptedWorker, say, toy_model, toy_settings
from tests.waiting import wait_for
from web import create_app
from web.services import KEY, Services


class Rig:
    """One web process and one pair of workers over one ledger."""

    def __init__(self, ledger: Ledger, settings: Settings, script: Script | None, wait_registered: bool) -> None:
        self.ledger = ledger
        self.bells = HeardBells()
        self.app: Flask = create_app(settings, ledger, self.bells, toy_model())
        self.services: Services = self.app.extensions[KEY]
        assert not wait_registered or self.services.node.wait_registered(5)
        self.worker = ScriptedWorker(ledger, script) if script is not None else None

    def post(
        self,
        path: str,
        body: Any,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        buffered: bool = True,
    ) -> TestResponse:
        """Not ``buffered``: the answer is read by iterating over it, and closing it is the client's leaving."""
        names = {"X-Request-Id": request_id} if request_id is not None else {}
        raw = body if isinstance(body, bytes) else json.dumps(body)
        return self.app.test_client().post(path, data=raw, headers={**names, **(headers or {})}, buffered=buffered)

    def complete(
        self,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        buffered: bool = True,
        **fields: Any,
    ) -> TestResponse:
        body = {"model": "toy", "prompt": "hi", "max_tokens": 50, **fields}
        return self.post("/v1/completions", body, request_id, headers, buffered=buffered)

    def chat(
        self,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        buffered: bool = True,
        **fields: Any,
    ) -> TestResponse:
        body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.post("/v1/chat/completions", body, request_id, headers, buffered=buffered)

    def get(self, path: str) -> TestResponse:
        return self.app.test_client().get(path)

    def state(self, request_id: str) -> str:
        answer = self.get(f"/v1/requests/{request_id}")
        return str(answer.json["state"]) if answer.status_code == 200 else "UNKNOWN"  # type: ignore[index]

    def wait_state(self, request_id: str, state: str) -> None:
        wait_for(lambda: self.state(request_id) == state)

    def check_all_given_back(self) -> None:
        """Every place, mailbox and watcher of this process is free again, once its answers are out."""
        wait_for(lambda: len(self.services.node.mailboxes) == 0)
        taken = [self.services.seats.acquire(blocking=False) for _ in range(self.services.settings.web_threads)]
        assert all(taken), "a place was not given back"
        assert not self.services.seats.acquire(blocking=False), "a place was given back twice"
        for _ in taken:
            self.services.seats.release()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.stop()
        self.services.close()


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    monkeypatch.setattr("web.events.BLOCK_MS", 20)  # an app ends when its reader's last read does
    rigs: list[Rig] = []

    def make(
        script: Script | None = lambda work: say("hello"),
        wrap: Callable[[Ledger], Ledger] = lambda ledger: ledger,
        wait_registered: bool = True,
        **settings: object,
    ) -> Rig:
        rig = Rig(wrap(MemoryLedger(wall_ms)), toy_settings(**settings), script, wait_registered)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"), aof=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def start_web(valkey: EmbeddedValkey, tmp_path: Path) -> Iterator[StartWeb]:
    started: list[Web] = []

    def start(script: Script = lambda work: say("hello"), **environment: str) -> Web:
        settings = load_settings(redis_url=valkey.url, namespace=uuid.uuid4().hex)
        started.append(Web(settings, tmp_path, script, **environment))
        return started[-1]

    yield start
    for web in started:
        for child in web.gunicorn_workers() if web.process.poll() is None else []:
            child.kill()
        web.close()


def chunks(body: str) -> list[Any]:
    """The data of each server-sent event, parsed; ``[DONE]`` as it is. Comments are left out."""
    events = [part for part in body.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") and "\n" not in part for part in events)
    data = [part.removeprefix("data: ") for part in events]
    return [d if d == "[DONE]" else json.loads(d) for d in data]
