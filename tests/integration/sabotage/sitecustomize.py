"""Breaks a part of a real worker when told. Python imports this by itself where this folder is in PYTHONPATH.

A test makes a file ``<worker>.<how>`` in the folder that SABOTAGE names; the worker takes the file away and does it.
"""

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

LOOK_S = 0.05


def stuck_step(*_: Any, **__: Any) -> None:
    """Never ends; the other threads go on."""
    threading.Event().wait()


def selfish_step(*_: Any, **__: Any) -> None:
    """Never ends, and keeps the interpreter's lock: no other thread of the process runs any more."""
    ctypes.PyDLL(None).sleep(3600)


def dead_mover(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("nobody foresaw this")


def break_engine(step: Any) -> None:
    sys.modules["workers.engine.engine"].Engine.step = step  # type: ignore[attr-defined]


def break_mover(pull: Any) -> None:
    sys.modules["workers.mover"].Mover.pull = pull  # type: ignore[attr-defined]


HOW = {
    "stuck-step": lambda: break_engine(stuck_step),
    "selfish-step": lambda: break_engine(selfish_step),
    "dead-mover": lambda: break_mover(dead_mover),
}


def wait_for_orders(folder: Path, worker: str) -> None:
    while True:
        for how, act in HOW.items():
            order = folder / f"{worker}.{how}"
            if order.exists():
                order.unlink()
                act()
        threading.Event().wait(LOOK_S)


if "SABOTAGE" in os.environ and "-n" in sys.orig_argv:
    name = sys.orig_argv[sys.orig_argv.index("-n") + 1].split("@")[0]
    threading.Thread(
        target=wait_for_orders, args=(Path(os.environ["SABOTAGE"]), name), name="sabotage", daemon=True
    ).start()
