import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app import cli
from app.cli import build_parser, main, option_of
from app.launcher import launch
from app.launcher.checks import free_port
from app.launcher.plan import QUICK_DRAIN_S, Nodes, child_environment, cluster_specs, stop_budgets_s
from app.settings import Settings, load_settings

Capture = pytest.CaptureFixture[str]
VLLM_SERVE = (  # options of `vllm serve` that mean the same here
    *("--host", "--port", "--model", "--served-model-name", "--block-size"),
    *("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-dtype"),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


def test_options_are_named_as_vllm_names_them() -> None:
    assert set(VLLM_SERVE) <= {option_of(name) for name in Settings.model_fields}


@pytest.mark.parametrize("name", sorted(set(Settings.model_fields) - {"incarnation", "failpoints"}))
def test_every_setting_has_an_option_that_sets_it(name: str) -> None:
    default = Settings.model_fields[name].default
    if isinstance(default, bool):
        text = str(not default).lower()
    elif isinstance(default, int | float):
        text = str(default + 1 if name != "web_workers" else 2)
    else:
        given = {
            "kernels": "paddle",
            "weight_dtype": "float32",
            "kv_cache_dtype": "float16",
            "device": "gpu:1",
            "cores": "0-1",
            "log_level": "DEBUG",
            "redis_url": "redis://other",
            "broker_url": "redis://other",
        }
        text = given.get(name, "other")
    arguments = build_parser().parse_args(["up", option_of(name), text])
    settings = load_settings(**{name: getattr(arguments, name)})
    assert getattr(settings, name) != default
    found = getattr(settings, name)
    assert (str(found).lower() if isinstance(default, bool) else str(found)).endswith(text)


def test_children_get_what_the_options_said_and_not_a_foreign_incarnation() -> None:
    settings = load_settings(num_blocks="64", home="/somewhere", incarnation="mine")
    inherited = {"PATH": "/bin", "BATON_NUM_BLOCKS": "1", "BATON_INCARNATION": "not yours", "BATON_PORT": "9"}
    environment = child_environment(inherited, settings)
    assert environment == {
        "PATH": "/bin",
        "BATON_NUM_BLOCKS": "64",
        "BATON_HOME": "/somewhere",
        "BATON_PORT": "9",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_cluster_has_each_process_once_and_no_password_on_a_command_line(tmp_path: Path) -> None:
    settings = load_settings(log_level="WARNING")
    specs = cluster_specs(settings, Nodes(prefill=2, decode=3), {}, tmp_path, "baton:secret")
    names = [spec.name for spec in specs]
    assert names == ["prefill1", "prefill2", "decode1", "decode2", "decode3", "control1", "beat", "web", "flower"]
    assert [spec.name for spec in specs if spec.is_node] == names[:6]
    queues = {spec.name: spec.argv[spec.argv.index("-Q") + 1] for spec in specs if spec.is_node}
    assert queues["prefill2"] == "prefill"
    assert queues["decode3"] == "decode"
    assert queues["control1"] == "control"
    assert not any("secret" in argument for spec in specs for argument in spec.argv)
    assert [spec.name for spec in specs if "FLOWER_BASIC_AUTH" in spec.env] == ["flower"]
    assert min(specs, key=lambda spec: spec.stop_stage).name == "web"
    beat = next(spec for spec in specs if spec.name == "beat")
    assert str(tmp_path / "beat-schedule") in beat.argv


def test_everything_is_stopped_within_ten_seconds() -> None:
    assert sum(stop_budgets_s(QUICK_DRAIN_S).values()) + launch._LAST_REPORTS_S < 10


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["up", "--num-blocks", "none"], r"--num-blocks \(BATON_NUM_BLOCKS\): must be a whole number"),
        (["up", "--num-blocks", "-2"], r"--num-blocks \(BATON_NUM_BLOCKS\): must be at least 1"),
        (["up", "--redis-url", "foo"], r"--redis-url \(BATON_REDIS_URL\): must be an address like redis://"),
        (["up", "--block-size", "0"], r"--block-size \(BATON_BLOCK_SIZE_TOKENS\): must be at least 1"),
        (["status", "--port", "70000"], r"--port \(BATON_PORT\): .*65535"),
    ],
)
def test_a_wrong_option_is_one_line_with_its_name_and_exit_status_2(
    argv: list[str], line: str, capsys: Capture
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert re.match(rf"baton: {line}", error)
    assert error.count("\n") == 1


def test_a_wrong_variable_is_named_without_an_option(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("BATON_PORT", "http")
    assert main(["status"]) == 2
    assert capsys.readouterr().err.startswith("baton: BATON_PORT: ")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["up", "--prefill", "0"], "--prefill: '0' is no number from 1 to 64"),
        (["up", "--decode", "x"], "--decode: 'x' is no number from 1 to 64"),
        (["up", "--start-timeout-s", "0"], "--start-timeout-s: '0' is no number of seconds above 0"),
        (["up", "--prefil", "2"], "--prefil is no option of `baton up`: did you mean --prefill?"),
        (["up", "--max-model-le=5"], "--max-model-le is no option of `baton up`: did you mean --max-model-len?"),
        (["status", "--frobnicate"], "--frobnicate is no option of `baton status`; see `baton status --help`"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_status_2(
    argv: list[str], line: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_run", lambda arguments: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    error = capsys.readouterr().err
    assert error.startswith(f"baton: {line}")
    assert error.count("\n") == 1


def test_version(capsys: Capture) -> None:
    assert main(["version"]) == 0
    shown = capsys.readouterr().out
    assert re.fullmatch(r"baton \d+\.\d+\.\d+\n", shown)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == shown


NODE = {
    "name": "decode1@here",
    "role": "decode",
    "pid": 77,
    "host": "here",
    "incarnation": "abc",
    "health": "healthy",
    "heartbeat_age_s": 0.31,
    "blocks": {"total": 64, "free": 50, "cached": 4},
    "sequences": {"running": 3, "waiting": 1},
}


class FakeWeb(HTTPServer):
    ready: tuple[int, object]
    cluster: tuple[int, object]


class Answer(BaseHTTPRequestHandler):
    server: FakeWeb

    def do_GET(self) -> None:
        status, body = {"/ready": self.server.ready, "/cluster": self.server.cluster}[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def web() -> Iterator[FakeWeb]:
    with FakeWeb(("127.0.0.1", 0), Answer) as server:
        server.ready = (200, {"ready": True, "reasons": []})
        server.cluster = (200, {"nodes": [NODE], "leases": [{}], "queued": 5, "waiting_for_grant": 2})
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def status(web: FakeWeb, *options: str) -> int:
    return main(["status", "--port", str(web.server_address[1]), *options])


def test_status_of_a_cluster_that_serves(web: FakeWeb, capsys: Capture) -> None:
    assert status(web) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["ready", "5 queued, 2 waiting for a decode node, 1 leases"]
    assert lines[3].split("  ")[0] == "decode1@here"
    assert "54 of 64" in lines[3]


def test_status_of_a_cluster_that_does_not_serve(web: FakeWeb, capsys: Capture) -> None:
    web.ready = (503, {"ready": False, "reasons": ["no healthy decode node"]})
    web.cluster = (503, {"error": {}})
    assert status(web) == 1
    assert capsys.readouterr().out == "not ready: no healthy decode node\nthe nodes cannot be listed\n"
    assert status(web, "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"ready": False, "reasons": ["no healthy decode node"]}


def test_status_as_json_has_the_shape_of_cluster_and_says_whether_it_is_ready(web: FakeWeb, capsys: Capture) -> None:
    assert status(web, "--json") == 0
    _, cluster = web.cluster
    assert isinstance(cluster, dict)
    assert json.loads(capsys.readouterr().out) == {**cluster, "ready": True, "reasons": []}


@pytest.mark.parametrize("answer", [(200, b"<html>"), (404, {}), (200, {"hello": 1})])
def test_status_of_something_else(web: FakeWeb, capsys: Capture, answer: tuple[int, object]) -> None:
    web.ready = answer
    assert status(web) == 1
    assert "is not Baton" in capsys.readouterr().err


def test_status_of_nothing_is_one_line(capsys: Capture) -> None:
    port = free_port("127.0.0.1", 0, "--port")
    assert main(["status", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"baton: nothing answers at http://127.0.0.1:{port}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("argv", [["status", "--json", "--port", "{port}"], ["up", "--help"], ["version"]])
def test_whoever_stops_reading_gets_no_traceback(web: FakeWeb, argv: list[str]) -> None:
    argv = [word.format(port=web.server_address[1]) for word in argv]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "app.cli", *argv]
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_command_line_is_light() -> None:
    """`baton status` in a loop must not import Celery or numpy each time."""
    code = "import sys, app.cli, app.launcher.status; print({'celery', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
