"""Web as it runs, for tests: gunicorn with a toy model over a real ledger, and a scripted worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from app.launcher.rolling import EXIT_REPORT
from app.ledger.redis import RedisLedger, connect
from app.protocol.commands import Snapshot
from app.settings import Settings
from tests.api.support import Script, ScriptedWorker
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]


class Web:
    """One gunicorn with its ledger and a scripted worker."""

    def __init__(self, settings: Settings, folder: Path, script: Script, root: Path = ROOT, **environment: str) -> None:
        self.ledger: RedisLedger = connect(settings)
        self.log = folder / "web.log"
        self.home = folder / "home"
        self.home.mkdir()
        environment |= {
            "HOME": str(self.home),
            "BATON_REDIS_URL": settings.redis_url,
            "BATON_NAMESPACE": settings.namespace,
            "BATON_PORT": "0",
            "BATON_HEARTBEAT_S": "0.1",
            "PYTHONPATH": str(root),
            "PYTHONUNBUFFERED": "1",
        }
        argv = [sys.executable, "-m", "gunicorn", "-c", "python:web.gunicorn_conf", "tests.api.toy_app:create_app()"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(argv, cwd=root, env=os.environ | environment, stdout=out, stderr=out)
        self.worker: ScriptedWorker | None = None
        self._clients: list[httpx.Client | openai.OpenAI] = []
        try:
            wait_for(lambda: self.process.poll() is not None or self._address() is not None, 20)
            assert self.process.poll() is None, self.log.read_text()
            self.url = str(self._address())
            self.http = httpx.Client(base_url=self.url, timeout=20)
            self._clients.append(self.http)
            self.worker = ScriptedWorker(self.ledger, script)
            wait_for(lambda: self.http.get("/ready").status_code == 200, 20)
        except BaseException:
            self.close()
            raise

    def _address(self) -> str | None:
        found = re.search(r"Listening at: (http://[^ ]+) ", self.log.read_text())
        return found[1] if found else None

    def client(self, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **options)
        self._clients.append(client)
        return client

    def state(self, request_id: str) -> str:
        return str(self.ledger.execute(Snapshot(client_id=request_id)).state)

    def gunicorn_workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if EXIT_REPORT not in child.cmdline()]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self.worker is not None:
            self.worker.stop()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.ledger.close()


StartWeb = Callable[..., Web]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": "hi", "max_tokens": 50, **fields}


HI: Any = [{"role": "user", "content": "hi"}]
