"""Thread settings, each in a process of its own: they are read once per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.engine.runtime import _is_amd

ROOT = Path(__file__).parents[3]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_threads_and_cores_are_set_before_paddle_loads() -> None:
    code = """
import json, os, sys
import workers.engine, workers.engine.runtime as runtime
assert "paddle" not in sys.modules
runtime.configure(2, cores=[min(os.sched_getaffinity(0))])
runtime.configure(2)
runtime.require_configured(2)
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
print(json.dumps([[os.environ[name] for name in names], len(os.sched_getaffinity(0)), "paddle" in sys.modules]))
"""
    ran = python(code)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [["2", "2", "2"], 1, True]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import paddle_stub; runtime.configure(1)", "before Paddle is imported"),
        ("runtime.configure(0)", "num_threads=0"),
        ("runtime.configure(1); runtime.configure(2)", "before Paddle is imported"),
        ("runtime.require_configured(1)", "wants 1 threads"),
        ("runtime.configure(1, cores=[100000])", "not all among the available"),
    ],
)
def test_what_comes_too_late_or_cannot_be_had_is_refused(code: str, message: str) -> None:
    stub = "import sys, types; sys.modules.update(paddle=types.ModuleType('paddle'))"
    prepared = code.replace("import paddle_stub", stub)
    ran = python(f"import workers.engine.runtime as runtime\n{prepared}")
    assert ran.returncode == 1
    assert "StartupError" in ran.stderr
    assert message in ran.stderr


@pytest.mark.parametrize(("vendor", "expected"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_amd_is_told_by_its_vendor(tmp_path: Path, vendor: str, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nvendor_id : {vendor}\n")
    assert _is_amd(cpuinfo) is expected
    assert _is_amd(tmp_path / "absent") is False
