"""The README's commands for each process by hand, taken from the README, in an order in which nothing is there yet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.launcher.plan import SOURCE_ROOT
from app.valkey import EmbeddedValkey
from tests.integration.baton import share_caches
from tests.integration.by_hand import Web, free_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

START_S = 120.0
STOP_S = 45.0


def readme_commands() -> list[str]:
    """The lines of the section's code block that start a process."""
    section = (SOURCE_ROOT / "README.md").read_text().split("## Each process by hand")[1].split("\n## ")[0]
    lines = re.findall(r"^((?:FLOWER_BASIC_AUTH=\S+ )?(?:celery|gunicorn) .*)$", section, re.MULTILINE)
    return [str(line) for line in lines]


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    started: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        yield started
        for process in started.values():
            stack.callback(process.wait)
            stack.callback(process.kill)


def test_the_readmes_commands_serve_when_redis_comes_last_and_end_cleanly(
    tmp_path: Path, models: Path, processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    share_caches(tmp_path, models)
    valkey = EmbeddedValkey(tmp_path / "valkey", port=free_port())
    web, flower_port = Web(free_port()), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BATON_HOME": str(tmp_path),
        "BATON_REDIS_URL": valkey.url,
        "BATON_PORT": str(web.port),
        "BATON_NUM_BLOCKS": "64",
        "BATON_MAX_NUM_SEQS": "4",
    }
    commands = readme_commands()
    assert len(commands) == 6
    for command in reversed(commands):
        command = command.replace("/tmp/baton-beat", str(tmp_path / "beat")).replace("5555", str(flower_port))
        name = re.sub(r".*(-Q \w+|beat|flower|gunicorn).*", r"\1", command).removeprefix("-Q ").split()[0]
        with (tmp_path / f"{name}.log").open("wb") as log:
            processes[name] = subprocess.Popen(
                ["sh", "-c", re.sub(r"(celery|gunicorn) ", r"exec \1 ", command, count=1)],
                cwd=SOURCE_ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    assert set(processes) == {"prefill", "decode", "control", "beat", "flower", "gunicorn"}

    def logs() -> str:
        return "\n".join(f"{name}:\n{(tmp_path / f'{name}.log').read_text()[-1500:]}" for name in processes)

    wait_for(lambda: web.answers("/health", 200), START_S, logs)
    status, reasons = web.ask("GET", "/ready")
    assert status == 503, "without Redis it says that it is not ready"
    assert reasons["reasons"]
    valkey.start()
    try:
        wait_for(lambda: web.answers("/ready", 200), START_S, logs)
        assert [name for name, process in processes.items() if process.poll() is not None] == []
        body = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "What is 2+2? Answer with the number only."}],
            "temperature": 0,
        }
        status, answer = web.ask("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == "2 + 2 = 4"  # type: ignore[index]
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        assert {name: process.wait(STOP_S) for name, process in processes.items()} == dict.fromkeys(processes, 0)
    finally:
        valkey.stop()
