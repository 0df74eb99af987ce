"""What ``baton up`` finds out before it starts a worker."""

from __future__ import annotations

import pytest

from app.launcher import prepare
from app.settings import load_settings


def test_a_device_that_this_paddle_cannot_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    paddle = pytest.importorskip("paddle")
    if paddle.is_compiled_with_cuda():
        pytest.skip("this Paddle computes on GPUs")
    monkeypatch.setattr(prepare, "get_settings", lambda: load_settings(device="gpu:0", model="/no/such/model"))
    assert prepare.main() == 1
    said = capfd.readouterr().out
    assert said == "error: BATON_DEVICE=gpu:0: this Paddle is built for CPUs only: install paddlepaddle-gpu\n"
