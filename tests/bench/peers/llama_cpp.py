"""llama.cpp through its own ``llama-batched-bench``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

TIMEOUT_S = 600.0
BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
"""llama.cpp's own defaults."""


class LlamaCpp:
    """Each question starts the program anew; it times itself, after a run that warms it up."""

    def __init__(self, name: str, programs: Path, model: Path, threads: int) -> None:
        self.name = name
        self._programs = programs
        self._model = model
        self._threads = threads

    def prefill_s(self, tokens: int) -> float:
        return float(self._run(prompt=tokens, answer=1, batch=1)["t_pp"])

    def decode_tokens_per_s(self, batch: int, context: int, steps: int) -> float:
        return float(self._run(prompt=context, answer=steps, batch=batch)["speed_tg"])

    def _run(self, prompt: int, answer: int, batch: int) -> dict[str, Any]:
        room = (prompt + answer) * batch
        sizes = {"-npp": prompt, "-ntg": answer, "-npl": batch, "-c": room, "-t": self._threads}
        sizes |= {"-b": BATCH_TOKENS, "-ub": MICRO_BATCH_TOKENS}
        command = [str(self._programs / "llama-batched-bench"), "-m", str(self._model), "--output-format", "jsonl"]
        command += [str(part) for pair in sizes.items() for part in pair]
        environment = os.environ | {"LD_LIBRARY_PATH": str(self._programs)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        if ran.returncode or len(rows) != 1:
            raise RuntimeError(f"{self.name}: {' '.join(command)} ended with {ran.returncode}: {ran.stderr[-1000:]}")
        return dict(rows[0])
