"""Makes model and kernels ready: ``python -m app.launcher.prepare``, run once by ``baton up`` before anything else.

It also finds what no worker could work with: the device, or a length that no request fits into. A process of its own,
because a conversion takes the memory of the whole model, and so that Ctrl-C ends it at once.
It writes lines that start with one of the words below; all others are for the log.
"""

from __future__ import annotations

import subprocess
import sys

from app.errors import StartupError
from app.kv.layout import KVDtype
from app.launcher.kernels import build_kernels
from app.launcher.model_facts import model_facts
from app.model.limits import check_room
from app.model.resolve import resolve_model
from app.settings import get_settings

DEVICE_S = 120.0
"""Importing Paddle on a busy machine, and waking a GPU up."""
PROGRESS = "progress: "
RESULT = "model: "
ERROR = "error: "


def main() -> int:
    """Make the model ready in the cache and say what it is."""
    try:
        settings = get_settings()
        check_device(settings.device)
        folder = resolve_model(settings.model, settings.home, lambda line: _say("model: " + line))
        check_room(settings, folder, folder.tokenizer())
        compiled = build_kernels(settings, lambda line: _say("kernels: " + line)) != ""
        # Pure Paddle computes with float32 copies of the rounded weights.
        item_bytes = 2 if compiled and settings.weight_dtype == "float16" else 4
        kv_dtype: KVDtype = "float16" if settings.kv_cache_dtype == "float16" else "float32"
        facts = model_facts(folder.name, str(folder.path), folder.config, item_bytes, kv_dtype)
    except StartupError as error:
        print(ERROR + " ".join(str(error).split()), flush=True)
        return 1
    print(RESULT + facts.model_dump_json(), flush=True)
    return 0


def _say(line: str) -> None:
    print(PROGRESS + line, flush=True)


def check_device(device: str) -> None:
    """Ask Paddle for the device, in a process of its own: nothing here needs Paddle, or knows the workers.

    Raises:
        StartupError: the workers could not compute there.
    """
    if device == "cpu":
        return
    command = [sys.executable, "-m", "workers.engine.device", device]
    try:
        asked = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=DEVICE_S)
    except subprocess.TimeoutExpired:
        raise StartupError(f"BATON_DEVICE={device}: Paddle has not reached it within {DEVICE_S:g} s") from None
    if asked.returncode:
        raise StartupError(asked.stdout.strip() or f"BATON_DEVICE={device}: Paddle ended with {asked.returncode}")


if __name__ == "__main__":
    sys.exit(main())
