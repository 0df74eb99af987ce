"""Two releases side by side, as real processes: a rolling upgrade under load fails nothing, then the old is refused."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.launcher.plan import SOURCE_ROOT
from app.valkey import EmbeddedValkey
from app.versions import SPOKEN
from tests.integration.baton import share_caches
from tests.integration.by_hand import Web, free_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.model, pytest.mark.matrix, pytest.mark.short, pytest.mark.timeout(400)]

START_S = 120.0
STOP_S = 45.0
NEXT = SPOKEN.newest + 1
REFERENCES = Path(__file__).parents[1] / "references"
GREEDY: dict[str, Any] = json.loads((REFERENCES / "greedy_reference.json").read_text())[0]
MAX_TOKENS = 24
BODY = {
    "model": "smollm2-135m-instruct",
    "prompt": GREEDY["prompt_ids"],
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
    "return_token_ids": True,
}
BUMPED = {
    "app/versions.py": (f"newest={SPOKEN.newest}", f"newest={NEXT}"),
    # A field that this release does not know, and would refuse.
    "app/protocol/messages.py": (
        "    decode_address: Id\n",
        f'    decode_address: Id\n    reason: Annotated[str, Since({NEXT})] = "room"\n',
    ),
}


def next_release(folder: Path) -> Path:
    """A copy of this source tree that reads one version more, and has more to say from then on."""
    for name in ("app", "workers", "web"):
        shutil.copytree(SOURCE_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCE_ROOT / "celery_config.py", folder)
    for path, (old, new) in BUMPED.items():
        text = (folder / path).read_text()
        assert text.count(old) == 1
        text = text.replace(old, new)
        (folder / path).write_text(text.replace("import SPOKEN\n", "import SPOKEN, Since\n"))
    return folder


class Cluster:
    """Processes of both releases on one ledger."""

    def __init__(self, folder: Path, redis_url: str, models: Path, stack: ExitStack) -> None:
        share_caches(folder, models)
        self._folder = folder
        self._stack = stack
        self._trees = {"this": SOURCE_ROOT, "next": next_release(folder / "next")}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BATON_HOME": str(folder),
            "BATON_REDIS_URL": redis_url,
            "BATON_NUM_BLOCKS": "64",
            "BATON_MAX_NUM_SEQS": "4",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.web = Web(0)

    def worker(self, release: str, role: str, name: str) -> None:
        self._start(release, name, ["celery", "-A", "celery_config", "worker", "-Q", role, "-n", f"{name}@%h"])

    def start_web(self, release: str, name: str) -> None:
        """Further requests go there as soon as it is ready."""
        web = Web(free_port())
        self._start(release, name, ["gunicorn", "-c", "python:web.gunicorn_conf", "web:create_app()"], web.port)
        self.wait_for(lambda: web.answers("/ready", 200))
        self.web = web

    def _start(self, release: str, name: str, command: list[str], port: int = 0) -> None:
        tree = self._trees[release]
        environment = self._environment | {"PYTHONPATH": str(tree), "BATON_PORT": str(port or free_port())}
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.processes[name] = process
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"{name}:\n{self.log(name)[-1500:]}" for name in self.processes)

    def wait_for(self, condition: Any) -> None:
        wait_for(condition, START_S, self.logs)

    def show(self) -> dict[str, Any]:
        return self.web.ask("GET", "/cluster")[1]

    def healthy(self) -> set[str]:
        return {node["name"].split("@")[0] for node in self.show()["nodes"] if node["health"] == "healthy"}

    def stop(self, name: str) -> None:
        """As a supervisor does; it has to end well."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0, self.log(name)[-2000:]


class Load:
    """One request after the other, each compared with the reference."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self.exact = 0
        self.wrong: list[object] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                status, answer = self._cluster.web.ask("POST", "/v1/completions", BODY)
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(error)
                continue
            expected = GREEDY["output_ids"][:MAX_TOKENS]
            if status == 200 and answer["choices"][0]["token_ids"] == expected:  # type: ignore[index]
                self.exact += 1
            else:
                self.wrong.append((status, answer))

    def some_more(self) -> None:
        """Wait for three answers that were all asked for from now on."""
        enough = self.exact + 4
        self._cluster.wait_for(lambda: self.exact >= enough or self.wrong)

    def end(self) -> None:
        self._over.set()
        self._thread.join(timeout=60)


@pytest.fixture
def cluster(tmp_path: Path, models: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        valkey = EmbeddedValkey(tmp_path / "valkey", port=free_port())
        stack.callback(valkey.stop)
        valkey.start()
        yield Cluster(tmp_path, valkey.url, models, stack)


def test_two_releases_run_side_by_side_until_the_last_old_process_has_gone(cluster: Cluster) -> None:
    for role in ("prefill", "decode"):
        cluster.worker("this", role, f"{role}1")
    cluster.start_web("this", "web1")
    load = Load(cluster)
    try:
        for role in ("prefill", "decode"):
            cluster.worker("next", role, f"{role}2")
        cluster.wait_for(lambda: {"prefill2", "decode2"} <= cluster.healthy())
        load.some_more()
        cluster.stop("prefill1")
        load.some_more()  # a prefill node of the next release, decode nodes of both
        cluster.stop("decode1")
        load.some_more()
        assert cluster.show()["version"] == SPOKEN.newest
        cluster.start_web("next", "web2")
        load.some_more()
        cluster.stop("web1")
        cluster.wait_for(lambda: cluster.show()["version"] == NEXT)
        load.some_more()
    finally:
        load.end()
    assert load.wrong == []
    cluster.worker("this", "decode", "late")
    process = cluster.processes["late"]
    cluster.wait_for(lambda: process.poll() is not None)
    assert process.returncode != 0
    reads = str(SPOKEN.newest) if SPOKEN.oldest == SPOKEN.newest else f"{SPOKEN.oldest} to {SPOKEN.newest}"
    assert f"version {NEXT}, newer than this process reads ({reads})" in cluster.log("late")
