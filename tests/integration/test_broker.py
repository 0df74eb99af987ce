"""A worker's connections to the broker die without a word: it consumes again, and what beat orders is done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from celery import Celery

from app.broker import broker_options
from app.launcher.plan import SOURCE_ROOT
from app.settings import Settings
from app.valkey import EmbeddedValkey
from tests.integration.proxy import Proxy
from tests.waiting import wait_for

START_S = 40.0
CONSUMES_S = 20.0
"""3 s without an answer, up to 2 s until that is looked at, one call on a dead connection, and the greeting of other
workers on another: 10 s. The rest is for a busy machine; with Celery's own figures it takes 33 s."""


class ControlWorker:
    """The one worker that needs no model."""

    def __init__(self, folder: Path, server: EmbeddedValkey, stack: ExitStack) -> None:
        self.proxy = Proxy(int(server.url.rsplit(":", 1)[1].removesuffix("/0")))
        stack.callback(self.proxy.close)
        self._log = folder / "control.log"
        broker_url = f"redis://127.0.0.1:{self.proxy.port}/0"
        environment = os.environ | {"BATON_REDIS_URL": server.url, "BATON_BROKER_URL": broker_url}
        celery = [sys.executable, "-m", "celery", "-A", "celery_config"]
        command = [*celery, "worker", "-Q", "control", "-n", "c@%h", "-l", "INFO"]
        with self._log.open("wb") as log:
            process = subprocess.Popen(command, cwd=SOURCE_ROOT, env=environment, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        self._app = stack.enter_context(Celery("beat", broker=server.url, set_as_current=False))
        self._app.conf.broker_transport_options = broker_options(Settings(redis_url=server.url))

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_until_it_consumes(self, within_s: float) -> None:
        """Order scans, as beat does, until one is done: the first may be lost."""
        before = self.log.count("succeeded")

        def consumes() -> bool:
            self._app.send_task("control.scan", queue="control", ignore_result=True)
            return self.log.count("succeeded") > before

        wait_for(consumes, within_s, lambda: self.log[-3000:])


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ControlWorker]:
    with ExitStack() as stack:
        server = EmbeddedValkey(tmp_path / "valkey", port=0)
        stack.callback(server.stop)
        server.start()
        yield ControlWorker(tmp_path, server, stack)


def test_a_worker_whose_broker_connections_die_consumes_again(worker: ControlWorker) -> None:
    worker.wait_until_it_consumes(START_S)
    worker.proxy.forget()
    worker.wait_until_it_consumes(CONSUMES_S)
    worker.proxy.reset()
    worker.wait_until_it_consumes(CONSUMES_S)
