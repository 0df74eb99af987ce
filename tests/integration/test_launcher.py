"""`baton up` as a person runs it: a real cluster, real kills. The model comes from the usual cache."""

import functools
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
from redis import Redis

from app.launcher.plan import SOURCE_ROOT
from app.valkey import EmbeddedValkey
from tests.integration.baton import START_S, STOP_S, Baton

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

Start = Callable[..., Baton]
CHILDREN = {
    "decode1": ("-Q", "decode"),
    "prefill1": ("-Q", "prefill"),
    "control1": ("-Q", "control"),
    "beat": ("beat",),
    "flower": ("flower",),
    "web": ("gunicorn",),
    "valkey": ("app.launcher.ledger_child",),
}
"""Words that tell each child's command line from the others'."""


@pytest.fixture
def home(tmp_path: Path, new_home: Callable[[Path], Path]) -> Path:
    return new_home(tmp_path)


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Baton] = []

    def start_one(*options: str, **variables: str) -> Baton:
        small = ("--num-blocks", "32", "--max-num-seqs", "4")
        baton = Baton(home, tmp_path / f"output{len(started)}", *small, *options, **variables)
        started.append(baton)
        return baton

    yield start_one
    for baton in started:
        baton.stop()


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def left_behind(home: Path) -> list[str]:
    """Sockets, locks, pid files and anything else but models, logs, the ledger's data, which keeps its lock file, and
    the file in which workers see each other: to remove it is to part those who have it from those who come."""
    allowed = (home / "run" / "logs", home / "ledger", home / "threads")
    found = []
    for folder, _, files in os.walk(home):  # does not follow the link to the models
        for file in files:
            path = Path(folder, file)
            is_data = any(place in (path, *path.parents) for place in allowed)
            if not is_data or path.is_socket() or path.suffix == ".pid":
                found.append(str(path.relative_to(home)))
    return found


def refused(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def assert_ended(baton: Baton, processes: list[psutil.Process], within_s: float) -> None:
    """A zombie has ended: that it is still listed is the business of process 1, whose child it has become."""
    _, listed = psutil.wait_procs([p for p in processes if p.pid != baton.process.pid], timeout=within_s)
    assert [process for process in listed if not is_zombie(process)] == []


def is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def assert_all_gone(baton: Baton, processes: list[psutil.Process], within_s: float) -> None:
    assert_ended(baton, processes, within_s)
    assert refused(baton.port)


def assert_nothing_left(home: Path, shm_before: set[str]) -> None:
    assert left_behind(home) == []
    assert shared_memory() <= shm_before


def test_each_killed_child_comes_back_by_itself_and_sigterm_then_leaves_nothing(home: Path, start: Start) -> None:
    shm_before = shared_memory()
    baton = start(BATON_NODE_TTL_S="60")
    baton.wait_until_ready()
    before = baton.nodes()
    for name, words in CHILDREN.items():
        baton.child(*words).kill()
        if name in before:  # by its silence alone the ledger would know in a minute
            baton.wait_for(functools.partial(is_known_to_be_dead, baton, before[name]["incarnation"]), 5)
        baton.wait_for(functools.partial(baton.printed, f"{name} started again"), 10)
        assert f"\n{name} ended (SIGKILL): starting it again in 0.5 s" in baton.text
        baton.wait_for(baton.is_ready, START_S)
    baton.wait_for(lambda: set(before) <= set(baton.nodes()), START_S)
    after = baton.nodes()
    for name in ("decode1", "prefill1", "control1"):
        assert after[name]["incarnation"] != before[name]["incarnation"]
        assert after[name]["pid"] != before[name]["pid"]

    processes = baton.processes()
    sent_at = time.monotonic()
    baton.process.send_signal(signal.SIGTERM)
    assert baton.process.wait(STOP_S) == 0
    assert time.monotonic() - sent_at < STOP_S
    assert_all_gone(baton, processes, within_s=0.5)
    assert_nothing_left(home, shm_before)


def is_known_to_be_dead(baton: Baton, incarnation: str) -> bool:
    nodes = baton.get("/cluster")[1]["nodes"]
    return not any(node["incarnation"] == incarnation and node["health"] == "healthy" for node in nodes)


def test_children_end_with_a_killed_launcher_and_ctrl_c_during_an_answer_of_the_next_leaves_nothing(
    home: Path, start: Start
) -> None:
    shm_before = shared_memory()
    killed = start()
    killed.wait_until_ready()
    processes = killed.processes()
    body = {"model": "smollm2-135m-instruct", "prompt": "Once", "max_tokens": 450, "ignore_eos": True, "stream": True}
    open_answer = killed.lines("/v1/completions", body)
    next(open_answer)
    killed.process.kill()
    killed.process.wait()
    assert_all_gone(killed, processes, within_s=5)
    open_answer.close()

    # the next one cleans up; Ctrl-C during an answer ends it with an error
    baton = start()
    baton.wait_until_ready()
    processes = baton.processes()
    body = {"model": "smollm2-135m-instruct", "prompt": "Once", "max_tokens": 450, "ignore_eos": True, "stream": True}
    lines = baton.lines("/v1/completions", body)
    first = [next(lines) for _ in range(4)]
    assert first[0].startswith(b"data: {")
    sent_at = time.monotonic()
    baton.process.send_signal(signal.SIGINT)
    rest = b"".join(lines)
    assert baton.process.wait(STOP_S) == 0
    assert time.monotonic() - sent_at < STOP_S
    assert b'"error"' in rest
    assert b"[DONE]" not in rest
    assert_all_gone(baton, processes, within_s=0.5)
    assert_nothing_left(home, shm_before)


def test_ctrl_c_before_it_is_ready_leaves_nothing(home: Path, start: Start) -> None:
    baton = start()
    baton.wait_for(lambda: "\nstarting " in baton.text, START_S)
    processes = baton.processes()
    baton.process.send_signal(signal.SIGINT)
    assert baton.process.wait(STOP_S) == 130
    assert_ended(baton, processes, within_s=0.5)
    assert left_behind(home) == []


def expect_refusal(baton: Baton, line: str) -> None:
    assert baton.process.wait(60) != 0
    assert re.search(rf"^baton: .*{line}", baton.text, re.MULTILINE), baton.text
    assert "starting prefill1" not in baton.text
    assert left_behind(baton.home) == []


def test_a_taken_port_is_refused(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = str(other.getsockname()[1])
        expect_refusal(start("--port", port), rf"port {port} .*--port \(BATON_PORT\)")
        expect_refusal(start("--flower-port", port), rf"port {port} .*--flower-port \(BATON_FLOWER_PORT\)")


@pytest.mark.parametrize(("model", "line"), [("/no/such/model.gguf", "/no/such/model.gguf"), ("{file}", "model")])
def test_an_unreadable_model_is_refused(start: Start, tmp_path: Path, model: str, line: str) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but no more")
    expect_refusal(start("--model", model.format(file=broken)), line)


def test_a_cluster_that_does_not_fit_into_memory_is_refused(start: Start) -> None:
    expect_refusal(start("--num-blocks", "100000000"), "not enough memory")


def test_a_second_launcher_with_the_same_home_is_refused(start: Start) -> None:
    first = start()
    first.wait_for(lambda: "model " in first.text, 30)
    second = start()
    assert second.process.wait(60) == 1
    assert f"another `baton up` (pid {first.process.pid})" in second.text
    first.stop()


def test_a_given_server_that_evicts_or_does_not_answer_is_refused(start: Start, tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "given", aof=False)
    server.start()
    try:
        with Redis.from_url(server.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        expect_refusal(start(BATON_REDIS_URL=server.url), "allkeys-lru")
    finally:
        server.stop()
    expect_refusal(start(BATON_REDIS_URL=server.url), "cannot be reached .*BATON_REDIS_URL")


def test_a_second_ctrl_c_does_not_wait_and_a_given_server_is_left_running(start: Start, tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "given", aof=False)
    server.start()
    try:
        baton = start(BATON_REDIS_URL=server.url, BATON_DRAIN_TIMEOUT_S="60")
        baton.wait_until_ready()
        assert "valkey" not in baton.text.split("starting ")[1].split("\n")[0]
        assert server.url in baton.text
        processes = baton.processes()
        baton.child("-Q", "prefill").suspend()
        baton.process.send_signal(signal.SIGINT)
        baton.wait_for(lambda: "\nstopping" in baton.text, 5)
        baton.process.send_signal(signal.SIGINT)
        assert baton.process.wait(5) == 0
        assert_all_gone(baton, processes, within_s=1)
        with Redis.from_url(server.url) as client:
            assert client.ping()
    finally:
        server.stop()


def test_a_cluster_that_is_up_says_where_it_is_and_keeps_its_password_to_itself(baton: Baton) -> None:
    assert baton.text.count("ready: ") == 1
    assert {"prefill1", "prefill2", "decode1", "decode2", "control1"} <= set(baton.nodes())
    assert len(baton.processes()) > len(CHILDREN)
    assert re.fullmatch(r"baton:\S{12,}", baton.flower_login)
    assert not any(baton.flower_login.split(":")[1] in " ".join(p.cmdline()) for p in baton.processes())
    assert baton.flower_get("/api/workers", login="")[0] == 401
    assert baton.flower_get("/api/workers", login=baton.flower_login)[0] == 200


def test_status_of_a_cluster_that_is_up_for_a_person_and_for_a_script(baton: Baton) -> None:
    command = [sys.executable, "-m", "app.cli", "status", "--port", str(baton.port)]
    status = subprocess.run(command, cwd=SOURCE_ROOT, capture_output=True, text=True, check=False)
    assert status.returncode == 0
    assert status.stdout.startswith("ready\n")
    as_json = subprocess.run([*command, "--json"], cwd=SOURCE_ROOT, capture_output=True, text=True, check=False)
    assert as_json.returncode == 0
    facts = json.loads(as_json.stdout)
    assert (facts["ready"], facts["reasons"]) == (True, [])
    assert set(facts) == {"ready", "reasons", *baton.get("/cluster")[1]}
    assert {node["name"].split("@")[0] for node in facts["nodes"]} >= set(baton.nodes())
