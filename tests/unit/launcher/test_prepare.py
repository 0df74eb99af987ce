"""What ``baton up`` finds out before it starts a worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.errors import StartupError
from app.launcher import prepare
from app.settings import load_settings


def computes_on_gpus() -> bool:
    """Asked in a process of its own: with Paddle imported here, the engine's tests could not set its threads."""
    script = "import paddle; print(paddle.is_compiled_with_cuda())"
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    return asked.stdout.split()[-1] == "True"


def test_a_device_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "DEVICE_S", 0.001)
    with pytest.raises(StartupError, match=r"BATON_DEVICE=gpu:0: Paddle has not reached it"):
        prepare.check_device("gpu:0")


def test_a_device_that_this_paddle_cannot_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if computes_on_gpus():
        pytest.skip("this Paddle computes on GPUs")
    monkeypatch.setattr(prepare, "get_settings", lambda: load_settings(device="gpu:0", model="/no/such/model"))
    assert prepare.main() == 1
    said = capfd.readouterr().out
    assert said == "error: BATON_DEVICE=gpu:0: this Paddle is built for CPUs only: install paddlepaddle-gpu\n"
