"""Process-wide settings that Paddle's maths libraries read once, when they are loaded."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Collection
from pathlib import Path

from app.errors import StartupError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_configured_threads: int | None = None


def configure(num_threads: int, cores: Collection[int] = ()) -> None:
    """Fix the number of compute threads of this process and import Paddle. Twice the same is fine.

    ``cores``: pin the process to these cores; empty leaves that to the system.

    Raises:
        StartupError: Paddle is loaded already, or the values cannot be had.
    """
    global _configured_threads
    if num_threads < 1:
        raise StartupError(f"num_threads={num_threads} must be at least 1")
    if _configured_threads != num_threads:
        if "paddle" in sys.modules:
            raise StartupError("the number of compute threads must be set before Paddle is imported")
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(num_threads)))
        if _is_amd():
            # Paddle's MKL takes its slow path on AMD unless told that the CPU has AVX2: 54 instead of 180 GFLOP/s.
            os.environ["MKL_DEBUG_CPU_TYPE"] = "5"
        _import_paddle()
        _configured_threads = num_threads
    if cores:
        available = os.sched_getaffinity(0)
        if not set(cores) <= available:
            raise StartupError(f"cores {sorted(cores)} are not all among the available {sorted(available)}")
        os.sched_setaffinity(0, cores)


def require_configured(num_threads: int) -> None:
    """Raise ``StartupError`` unless ``configure(num_threads)`` was called: the engine would run at another speed."""
    if _configured_threads != num_threads:
        raise StartupError(
            f"the engine wants {num_threads} threads, but runtime.configure was called with {_configured_threads}"
        )


def _import_paddle() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No ccache found")  # it would only speed up compiling
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        paddle = importlib.import_module("paddle")
    # Paddle takes SIGTERM for itself when it is imported and dies of it; the worker wants to drain.
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()
