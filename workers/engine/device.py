"""Where Paddle computes. ``python -m workers.engine.device gpu:0`` says whether it could: ``baton up`` asks first."""

from __future__ import annotations

import sys

from app.errors import StartupError
from workers.engine import runtime


def set_device(device: str) -> None:
    """Have Paddle, which is configured, compute on ``device``: "cpu" or "gpu:N".

    Raises:
        StartupError: it cannot.
    """
    import paddle

    if device != "cpu" and not paddle.is_compiled_with_cuda():
        raise StartupError(f"BATON_DEVICE={device}: this Paddle is built for CPUs only: install paddlepaddle-gpu")
    try:
        paddle.set_device(device)
    except ValueError as error:
        raise StartupError(f"BATON_DEVICE={device}: {error}") from error


def main(device: str) -> int:
    """Try. Prints why it does not work."""
    runtime.configure(1)
    try:
        set_device(device)
    except StartupError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
