"""Clients of the chaos tests: streamed answers with the time of each token, and what an undisturbed run answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.baton import Baton

MODEL = "smollm2-135m-instruct"
REFERENCES = Path(__file__).parents[1] / "references"
GREEDY: list[dict[str, Any]] = json.loads((REFERENCES / "greedy_reference.json").read_text())
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "ignore_eos": True}


def greedy(case: int, max_tokens: int) -> dict[str, Any]:
    """A greedy request that ends before its reference does."""
    prompt = GREEDY[case]["prompt_ids"]
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}


def sampled(case: int, seed: int, max_tokens: int) -> dict[str, Any]:
    """A sampled request of exactly ``max_tokens``."""
    return {**greedy(case, max_tokens), **SAMPLED, "seed": seed}


@dataclass(frozen=True)
class Expected:
    """The answer of an undisturbed run."""

    token_ids: list[int]
    text: str
    finish: str


def undisturbed(baton: Baton, request: Mapping[str, Any]) -> Expected:
    status, _, answer = baton.post("/v1/completions", request)
    assert status == 200, answer
    choice = answer["choices"][0]
    return Expected(choice["token_ids"], choice["text"], choice["finish_reason"])


@dataclass
class Stream:
    """One streamed request on a thread of its own, and what it has said so far."""

    baton: Baton
    request_id: str
    request: Mapping[str, Any]
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    """Monotonic time at which each token came."""
    text: str = ""
    finish: str | None = None
    done: int = 0
    error: str = ""
    """Why it ended without success: the code of the answer's error, or what broke the connection."""
    ended: threading.Event = field(default_factory=threading.Event)
    ended_at: float = 0.0

    def start(self) -> Stream:
        threading.Thread(target=self._run, name=self.request_id, daemon=True).start()
        return self

    @property
    def exact(self) -> bool:
        """Whether it says that it ended well; what it said is compared by whoever knows the answer."""
        return self.done == 1 and not self.error

    def answer(self) -> Expected:
        return Expected(self.token_ids, self.text, self.finish or "")

    def time_to_next(self, moment: float) -> float:
        """Seconds from ``moment`` to the first token after it, or to the end if none came. Of one that has ended."""
        return max(0.0, next((at for at in self.token_times if at > moment), self.ended_at) - moment)

    def _run(self) -> None:
        try:
            streamed = {**self.request, "stream": True}
            for line in self.baton.lines("/v1/completions", streamed, {"X-Request-Id": self.request_id}):
                self._take(line)
            if not self.done and not self.error:
                self.error = "cut off"
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = self.error or type(error).__name__
        finally:
            self.ended_at = time.monotonic()
            self.ended.set()

    def _take(self, line: bytes) -> None:
        if line == b"data: [DONE]\n":
            self.done += 1
        elif line.startswith(b"{"):  # not a stream: refused before it began
            self.error = json.loads(line)["error"]["code"]
        elif line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.error = chunk["error"]["code"]
                return
            for choice in chunk["choices"]:
                new = choice.get("token_ids") or []
                self.token_ids += new
                self.token_times += [time.monotonic()] * len(new)
                self.text += choice["text"]
                self.finish = choice["finish_reason"] or self.finish
