"""The last resort: a process ends at its time, whatever its threads do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from app.launcher.plan import SOURCE_ROOT

SELFISH = "ctypes.PyDLL(None).sleep(10)"
"""Keeps the interpreter's lock: no other thread of the process runs any more."""


def run(script: str) -> subprocess.CompletedProcess[str]:
    code = f"import ctypes, time\nfrom app.crash import do_not_end, end_in\n{script}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=SOURCE_ROOT, timeout=30, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("stuck", [SELFISH, "time.sleep(10)"])
def test_a_process_ends_when_nobody_puts_its_end_off_and_tells_where_it_stood(stuck: str) -> None:
    ended = run(f"end_in(0.2)\n{stuck}")
    assert ended.returncode == 1
    assert 'File "<string>", line 4' in ended.stderr


def test_an_end_that_is_put_off_or_taken_back_does_not_come() -> None:
    script = "for _ in range(4):\n    end_in(0.5)\n    time.sleep(0.2)\ndo_not_end()\ntime.sleep(0.6)"
    assert run(script).returncode == 0


@pytest.mark.parametrize(
    ("script", "status"), [(f"end_in(0.2)\n{SELFISH}", 1), ('end_crashed("n", "engine", TimeoutError("stuck"))', 70)]
)
def test_a_process_ends_though_nobody_takes_its_last_words(script: str, status: int) -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        logs = "import logging\nfrom app.log_lane import unblock\nlogging.basicConfig()\nunblock(logging.getLogger())"
        code = f"import ctypes\nfrom app.crash import end_crashed, end_in\n{logs}\nlogging.error('hello')\n{script}"
        process = subprocess.Popen([sys.executable, "-c", code], cwd=SOURCE_ROOT, stderr=writer)
        try:
            assert process.wait(timeout=20) == status
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(reader)
        os.close(writer)
