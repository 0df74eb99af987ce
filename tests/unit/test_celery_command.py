"""``celery -A celery_config …`` by hand: what our settings say where the command line does not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")} | variables
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def celery(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, up to where a worker or beat would begin its work; prints the level it would log at."""
    code = f"""
        from celery.apps.beat import Beat
        from celery.apps.worker import Worker
        from celery.bin.celery import main
        import sys

        Worker.start = Beat.run = lambda self: print("level", self.loglevel)
        sys.argv = ["celery", "-A", "celery_config", *{arguments!r}]
        main()
    """
    return run(code, **variables)


@pytest.mark.parametrize("command", [("worker", "-Q", "control"), ("beat",)])
def test_log_level_is_the_settings_unless_the_command_line_names_one(command: tuple[str, ...]) -> None:
    assert celery(*command).stdout == "level 20\n"
    assert celery(*command, BATON_LOG_LEVEL="ERROR").stdout == "level 40\n"
    assert celery(*command, "-l", "WARNING").stdout == "level 30\n"


def test_a_queue_that_does_not_exist_ends_the_worker_with_one_line() -> None:
    ended = celery("worker", "-Q", "prefil")
    assert ended.returncode == 1
    expected = "baton: -Q prefil: a worker serves exactly one of prefill, decode, control\n"
    assert ended.stderr.endswith(expected)
    assert "Traceback" not in ended.stderr


def test_a_worker_that_has_shut_down_ends_with_its_status_without_teardown() -> None:
    code = """
        import atexit

        class Worker:
            exitcode = 3

        class Slow:
            def __del__(self):
                print("taken apart")

        slow = Slow()
        atexit.register(print, "registered before")
        from celery.signals import worker_shutdown
        from workers.pool import NodePool

        pool = NodePool(limit=1)
        atexit.register(print, "registered after")
        {shutdown}
    """
    shut_down = "worker_shutdown.send(sender=Worker())"
    ended = run(code.format(shutdown=shut_down))
    assert (ended.returncode, ended.stdout) == (3, "registered after\n"), ended.stderr
    ended = run(code.format(shutdown="raise SystemExit(5)"))
    assert (ended.returncode, ended.stdout) == (5, "registered after\nregistered before\ntaken apart\n"), ended.stderr
