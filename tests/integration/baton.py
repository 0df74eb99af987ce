"""One `baton up`, as a person runs it, and what a person can ask it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from app.launcher.plan import SOURCE_ROOT
from tests.waiting import wait_for

START_S = 180.0
"""Two cores that others use too."""
STOP_S = 10.0


def share_caches(home: Path, models: Path) -> None:
    """Have a BATON_HOME of its own share the models, and the kernels that lie beside them."""
    for folder in (models, models.parent / "kernels"):
        folder.mkdir(exist_ok=True)
        (home / folder.name).symlink_to(folder)


class Baton:
    """One `baton up` and what it printed."""

    def __init__(self, home: Path, output: Path, *options: str, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        # The references are those of float32; rounded weights decide the closest of their choices otherwise.
        environment |= {"BATON_HOME": str(home), "BATON_WEIGHT_DTYPE": "float32", "OMP_NUM_THREADS": "1", **variables}
        self.home = home
        self.output = output
        free_ports = ("--port", "0", "--flower-port", "0")
        with output.open("wb") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.cli", "up", *free_ports, *options],
                cwd=SOURCE_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, condition: Callable[[], object], within_s: float) -> None:
        def came_true() -> bool:
            ended = self.process.poll() is not None
            met = bool(condition())
            assert met or not ended, f"it ended with {self.process.returncode}; it printed:\n{self.text}"
            return met

        in_vain = f"waited {within_s} s in vain; it printed:\n"
        wait_for(came_true, within_s, lambda: in_vain + self.text, look_every_s=0.1)

    def printed(self, start_of_line: str) -> bool:
        return f"\n{start_of_line}" in "\n" + self.text

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: "\nready: " in self.text, START_S)

    def find(self, pattern: str) -> str:
        match = re.search(pattern, self.text)
        assert match, f"{pattern} is not in:\n{self.text}"
        return match[1]

    @property
    def port(self) -> int:
        return int(self.find(r"ready: http://127\.0\.0\.1:(\d+)"))

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        status, _, answer = self._ask("GET", path, None, {})
        return status, answer

    def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers (lower case) and JSON of a POST."""
        return self._ask("POST", path, body, headers or {})

    def lines(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Iterator[bytes]:
        """The lines of a streamed POST; closing the iterator closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
            yield from connection.getresponse()
        finally:
            connection.close()

    def _ask(
        self, method: str, path: str, body: object, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"content-type": "application/json", **headers})
            response = connection.getresponse()
            lower = {name.lower(): value for name, value in response.getheaders()}
            return response.status, lower, json.loads(response.read())
        finally:
            connection.close()

    @property
    def flower_login(self) -> str:
        return self.find(r"user and password: (\S+)\)")

    def flower_get(self, path: str, login: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.find(r"Flower +http://(\S+)"), timeout=20)
        try:
            headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()} if login else {}
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def flower(self, path: str) -> dict[str, Any]:
        """JSON of Flower's API."""
        status, body = self.flower_get(path, self.flower_login)
        assert status == 200, body
        return dict(json.loads(body))

    def log(self, name: str) -> Path:
        """The log of a child by its name."""
        return self.home / "run" / "logs" / f"{name}.log"

    def is_ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The living nodes by name without the host."""
        nodes = self.get("/cluster")[1]["nodes"]
        return {node["name"].split("@")[0]: node for node in nodes if node["health"] == "healthy"}

    @contextmanager
    def heartbeats_watched(self) -> Iterator[list[float]]:
        """Ages in seconds of the heartbeats of all nodes, looked at ten times a second."""
        ages: list[float] = []
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.1):
                ages.extend(node["heartbeat_age_s"] for node in self.get("/cluster")[1]["nodes"])

        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            try:
                yield ages
            finally:
                done.set()
            looking.result()

    def processes(self) -> list[psutil.Process]:
        """The launcher and everything below it."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def child(self, *words: str) -> psutil.Process:
        """The direct child whose command line has all these words."""
        children = psutil.Process(self.process.pid).children()
        found = [child for child in children if set(words) <= set(child.cmdline())]
        assert len(found) == 1, f"{words}: {found}"
        return found[0]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S + 5)
            except subprocess.TimeoutExpired:
                self.process.kill()  # its children end with it
                self.process.wait()
                raise
