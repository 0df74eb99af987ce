"""An app over the memory twin, with a scripted worker in place of engines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from app.ledger.api import Ledger
from app.ledger.memory import MemoryLedger
from app.settings import Settings
from tests.api.support import HeardBells, Script, ScriptedWorker, say, toy_model, toy_settings, wait_for
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

    def post(self, path: str, body: Any, request_id: str | None = None) -> TestResponse:
        headers = {"X-Request-Id": request_id} if request_id is not None else {}
        raw = body if isinstance(body, bytes) else json.dumps(body)
        return self.app.test_client().post(path, data=raw, headers=headers)

    def complete(self, request_id: str | None = None, **fields: Any) -> TestResponse:
        return self.post("/v1/completions", {"model": "toy", "prompt": "hi", "max_tokens": 50, **fields}, request_id)

    def chat(self, request_id: str | None = None, **fields: Any) -> TestResponse:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"model": "toy", "messages": messages, **fields}, request_id)

    def get(self, path: str) -> TestResponse:
        return self.app.test_client().get(path)

    def state(self, request_id: str) -> str:
        answer = self.get(f"/v1/requests/{request_id}")
        return str(answer.json["state"]) if answer.status_code == 200 else "UNKNOWN"  # type: ignore[index]

    def wait_state(self, request_id: str, state: str) -> None:
        wait_for(lambda: self.state(request_id) == state)

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


def chunks(body: str) -> list[Any]:
    """The data of each server-sent event, parsed; ``[DONE]`` as it is. Comments are left out."""
    events = [part for part in body.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") and "\n" not in part for part in events)
    data = [part.removeprefix("data: ") for part in events]
    return [d if d == "[DONE]" else json.loads(d) for d in data]
