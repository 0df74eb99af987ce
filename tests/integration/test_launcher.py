"""`baton up` as a person runs it: a real cluster, real kills. The model comes from the usual cache."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.launcher.plan import SOURCE_ROOT
from app.model.resolve import resolve_model
from app.settings import load_settings
from app.valkey import EmbeddedValkey

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

START_S = 180.0
"""Two cores that others use too."""
STOP_S = 10.0
NAMES = {"valkey", "prefill1", "decode1", "control1", "beat", "web", "flower"}


class Baton:
    """One `baton up` and what it printed."""

    def __init__(self, home: Path, output: Path, *options: str, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        environment |= {"BATON_HOME": str(home), "OMP_NUM_THREADS": "1", **variables}
        self.home = home
        self.output = output
        small = ("--num-blocks", "32", "--port", "0", "--flower-port", "0", "--max-num-seqs", "4")
        with output.open("wb") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.cli", "up", *small, *options],
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
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {within_s} s in vain; it printed:\n{self.text}"
            try:
                self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            assert condition(), f"it ended with {self.process.returncode}; it printed:\n{self.text}"

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: "\nready: " in self.text, START_S)

    def find(self, pattern: str) -> str:
        match = re.search(pattern, self.text)
        assert match, f"{pattern} is not in:\n{self.text}"
        return match[1]

    @property
    def port(self) -> int:
        return int(self.find(r"ready: http://127\.0\.0\.1:(\d+)"))

    def get(self, path: str) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def is_ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def nodes(self) -> dict[str, dict]:
        """The living nodes by name without the host."""
        nodes = self.get("/cluster")[1]["nodes"]
        return {node["name"].split("@")[0]: node for node in nodes if node["health"] == "healthy"}

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
            self.process.wait(STOP_S + 5)


@pytest.fixture(scope="module")
def models() -> Path:
    settings = load_settings()
    return resolve_model("smollm2-135m-instruct", settings.home, print).path.parent


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    """A BATON_HOME of its own that shares the cached models."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(models)
    return home


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Iterator[Callable[..., Baton]]:
    started: list[Baton] = []

    def start_one(*options: str, **variables: str) -> Baton:
        baton = Baton(home, tmp_path / f"output{len(started)}", *options, **variables)
        started.append(baton)
        return baton

    yield start_one
    for baton in started:
        baton.stop()


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def left_behind(home: Path) -> list[str]:
    """Sockets, locks, pid files and anything else but models, logs and the ledger's data."""
    allowed = (home / "run" / "logs", home / "ledger")
    found = []
    for folder, _, files in os.walk(home):  # does not follow the link to the models
        for file in files:
            path = Path(folder, file)
            is_data = any(place in path.parents for place in allowed) and path.name != "lock"
            if not is_data or path.is_socket() or path.suffix == ".pid":
                found.append(str(path.relative_to(home)))
    return found


def refused(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def assert_all_gone(baton: Baton, processes: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs([p for p in processes if p.pid != baton.process.pid], timeout=within_s)
    assert not alive
    assert refused(baton.port)


def test_a_cluster_comes_up_serves_and_leaves_nothing_when_it_is_told_to_stop(home: Path, start) -> None:
    shm_before = shared_memory()
    baton = start()
    baton.wait_until_ready()
    assert baton.text.count("ready: ") == 1
    assert {"prefill1", "decode1", "control1"} <= set(baton.nodes())
    flower, login = baton.find(r"Flower +http://(\S+)"), baton.find(r"user and password: (\S+)\)")
    assert re.fullmatch(r"baton:\S{12,}", login)
    assert not any(login.split(":")[1] in " ".join(p.cmdline()) for p in baton.processes())
    assert flower_answers(flower, "") == 401
    assert flower_answers(flower, login) == 200

    command = [sys.executable, "-m", "app.cli", "status", "--port", str(baton.port)]
    status = subprocess.run(command, cwd=SOURCE_ROOT, capture_output=True, text=True, check=False)
    assert status.returncode == 0
    assert status.stdout.startswith("ready\n")

    processes = baton.processes()
    assert len(processes) >= len(NAMES)
    before = time.monotonic()
    baton.process.send_signal(signal.SIGTERM)
    assert baton.process.wait(STOP_S) == 0
    assert time.monotonic() - before < STOP_S
    assert_all_gone(baton, processes, within_s=0.5)
    assert left_behind(home) == []
    assert shared_memory() <= shm_before


def flower_answers(address: str, login: str) -> int:
    import base64

    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()} if login else {}
        connection.request("GET", "/api/workers", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_each_killed_child_comes_back_by_itself(start) -> None:
    baton = start()
    baton.wait_until_ready()
    before = baton.nodes()
    victims = {
        "decode1": baton.child("-Q", "decode"),
        "prefill1": baton.child("-Q", "prefill"),
        "beat": baton.child("beat"),
        "flower": baton.child("flower"),
        "web": baton.child("gunicorn"),
        "valkey": baton.child("app.launcher.ledger_child"),
    }
    for name, victim in victims.items():
        victim.kill()
        baton.wait_for(lambda name=name: f"\n{name} started again" in baton.text, 10)
        assert f"\n{name} ended (SIGKILL): starting it again in 0.5 s" in baton.text
        baton.wait_for(baton.is_ready, START_S)
    baton.wait_for(lambda: set(before) <= set(baton.nodes()), START_S)
    after = baton.nodes()
    for name in ("decode1", "prefill1"):
        assert after[name]["incarnation"] != before[name]["incarnation"]
        assert after[name]["pid"] != before[name]["pid"]


def test_the_ledger_knows_of_a_death_at_once(start) -> None:
    baton = start(BATON_NODE_TTL_S="60")
    baton.wait_until_ready()
    dead = baton.nodes()["decode1"]["incarnation"]
    baton.child("-Q", "decode").kill()

    def known() -> bool:
        nodes = baton.get("/cluster")[1]["nodes"]
        return not any(node["incarnation"] == dead and node["health"] == "healthy" for node in nodes)

    baton.wait_for(known, 5)  # the heartbeat alone would take a minute


def test_children_end_with_a_launcher_that_was_killed_and_the_next_one_cleans_up(home: Path, start) -> None:
    baton = start()
    baton.wait_until_ready()
    processes = baton.processes()
    baton.process.kill()
    baton.process.wait()
    assert_all_gone(baton, processes, within_s=10)
    again = start()
    again.wait_until_ready()
    again.stop()
    assert again.process.returncode == 0
    assert left_behind(home) == []


def test_a_second_ctrl_c_does_not_wait(start) -> None:
    baton = start(BATON_DRAIN_TIMEOUT_S="60")
    baton.wait_until_ready()
    processes = baton.processes()
    frozen = baton.child("-Q", "prefill")
    frozen.suspend()
    baton.process.send_signal(signal.SIGINT)
    baton.wait_for(lambda: "\nstopping" in baton.text, 5)
    baton.process.send_signal(signal.SIGINT)
    baton.process.wait(5)
    assert_all_gone(baton, processes, within_s=1)


def test_ctrl_c_before_it_is_ready_leaves_nothing(home: Path, start) -> None:
    baton = start()
    baton.wait_for(lambda: "\nstarting " in baton.text, START_S)
    processes = baton.processes()
    baton.process.send_signal(signal.SIGINT)
    assert baton.process.wait(STOP_S) == 130
    _, alive = psutil.wait_procs([p for p in processes if p.pid != baton.process.pid], timeout=0.5)
    assert not alive
    assert left_behind(home) == []


def expect_refusal(baton: Baton, line: str) -> None:
    assert baton.process.wait(60) != 0
    assert re.search(rf"^baton: .*{line}", baton.text, re.MULTILINE), baton.text
    assert "starting prefill1" not in baton.text
    assert left_behind(baton.home) == []


def test_a_taken_port_is_refused(start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = str(other.getsockname()[1])
        expect_refusal(start("--port", port), rf"port {port} .*--port \(BATON_PORT\)")
        expect_refusal(start("--flower-port", port), rf"port {port} .*--flower-port \(BATON_FLOWER_PORT\)")


@pytest.mark.parametrize(("model", "line"), [("/no/such/model.gguf", "/no/such/model.gguf"), ("{file}", "model")])
def test_an_unreadable_model_is_refused(start, tmp_path: Path, model: str, line: str) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but no more")
    expect_refusal(start("--model", model.format(file=broken)), line)


def test_a_cluster_that_does_not_fit_into_memory_is_refused(start) -> None:
    expect_refusal(start("--num-blocks", "100000000"), "not enough memory")


def test_a_second_launcher_with_the_same_home_is_refused(start) -> None:
    first = start()
    first.wait_for(lambda: "model " in first.text, 30)
    second = start()
    assert second.process.wait(60) == 1
    assert f"another `baton up` (pid {first.process.pid})" in second.text
    first.stop()


def test_a_given_server_that_evicts_or_does_not_answer_is_refused(start, tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "given", aof=False)
    server.start()
    try:
        from redis import Redis

        with Redis.from_url(server.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        expect_refusal(start(BATON_REDIS_URL=server.url), "allkeys-lru")
    finally:
        server.stop()
    expect_refusal(start(BATON_REDIS_URL=server.url), "BATON_REDIS_URL")


def test_a_given_server_is_used_and_left_running(start, tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "given", aof=False)
    server.start()
    try:
        baton = start(BATON_REDIS_URL=server.url)
        baton.wait_until_ready()
        assert "valkey" not in baton.text.split("starting ")[1].split("\n")[0]
        assert server.url in baton.text
        baton.stop()
        assert baton.process.returncode == 0
        assert psutil.pid_exists(server.pid)
    finally:
        server.stop()
