"""An engine in a process of its own: a line of JSON with a question, a line of JSON with the answer."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

STOP_S = 20.0


class Talking:
    """``command`` loads the model, prints "ready" on a line, then answers questions until its input ends."""

    def __init__(self, name: str, command: list[str], cwd: Path | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end of the block
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=cwd
        )

    def __enter__(self) -> Talking:
        self._listen("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._errors.close()

    def prefill_s(self, tokens: int) -> float:
        return float(self._ask({"prefill": tokens}))

    def decode_tokens_per_s(self, batch: int, context: int, steps: int) -> float:
        return batch * steps / float(self._ask({"decode": batch, "context": context, "steps": steps}))

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._child.stdin is not None
        print(json.dumps(question), file=self._child.stdin, flush=True)
        return json.loads(self._listen("answer ").removeprefix("answer "))

    def _listen(self, start: str) -> str:
        """The next line that starts so: engines print much else."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(start):
                return line.rstrip()
        self._errors.seek(0)
        raise RuntimeError(f"{self.name} has ended: {self._errors.read()[-2000:]}")
