"""Clients that stream answers, and when each of their tokens came."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

TIMEOUT_S = 300.0
WORDS = (
    "river",
    "stone",
    "window",
    "garden",
    "music",
    "winter",
    "silver",
    "doctor",
    "orange",
    "planet",
    "kitchen",
    "letter",
)
"""Each is one token of most vocabularies."""


@dataclass
class Answer:
    """One streamed answer. Times are those of ``time.perf_counter``, in seconds."""

    sent_at: float
    token_at: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies."""
        return [after - before for before, after in zip(self.token_at, self.token_at[1:], strict=False)]


def draw_prompt(tokens: int, source: random.Random) -> list[int]:
    return [source.randrange(100, 40_000) for _ in range(tokens)]


def draw_words(count: int, source: random.Random) -> str:
    return " ".join(source.choice(WORDS) for _ in range(count))


def ask(port: int, model: str, prompt: Sequence[int] | str, max_tokens: int) -> Answer:
    """Stream one answer of exactly ``max_tokens`` tokens.

    A prompt of token ids is for Baton alone and has every token counted. With text, for any server, each event counts
    as a token, and how many come is not checked.

    Raises:
        RuntimeError: it was refused, or ended with an error.
    """
    exact = not isinstance(prompt, str)
    body = {
        "model": model,
        "prompt": list(prompt) if exact else prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    if exact:
        body["return_token_ids"] = True
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        answer = Answer(time.perf_counter())
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
        for line in response:
            if line.startswith(b"data: {"):
                answer.token_at += [time.perf_counter()] * _tokens_in(json.loads(line[6:]), exact)
    finally:
        connection.close()
    if exact and len(answer.token_at) != max_tokens:
        raise RuntimeError(f"{len(answer.token_at)} tokens came, {max_tokens} were asked for")
    return answer


def _tokens_in(event: dict[str, Any], exact: bool) -> int:
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    if not event.get("choices"):
        return 0
    choice = event["choices"][0]
    if exact:
        return len(choice.get("token_ids") or ())
    return int(bool(choice.get("text")) or choice.get("finish_reason") is None)


class Failures:
    """What threads raised; raised again by ``check``."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def guard(self, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - raised by check
            self._errors.append(error)

    def check(self) -> None:
        for error in self._errors:
            raise error


def ask_at_once(
    port: int, model: str, prompts: Sequence[Sequence[Sequence[int] | str]], max_tokens: int
) -> list[Answer]:
    """One client for each list of prompts, which it sends one after another. Raises what the first that failed did."""
    answers: list[Answer] = []
    failures = Failures()

    def run(prompts: Sequence[Sequence[int] | str]) -> None:
        for prompt in prompts:
            answers.append(ask(port, model, prompt, max_tokens))

    threads = [threading.Thread(target=failures.guard, args=(partial(run, each),)) for each in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures.check()
    return answers


def ask_beside_long_prompts(
    port: int, model: str, streams: Sequence[str], max_tokens: int, long_prompts: Iterator[str]
) -> tuple[list[Answer], list[Answer]]:
    """Answers to ``streams``, asked at once, and to the long prompts that one more client sends back to back as long as
    they last, for one token each."""
    over = threading.Event()
    long_answers: list[Answer] = []
    failures = Failures()

    def run() -> None:
        while not over.is_set():
            long_answers.append(ask(port, model, next(long_prompts), 1))

    beside = threading.Thread(target=failures.guard, args=(run,))
    beside.start()
    try:
        answers = ask_at_once(port, model, [[stream] for stream in streams], max_tokens)
    finally:
        over.set()
        beside.join()
    failures.check()
    return answers, long_answers


def quantile(values: Sequence[float], part: float) -> float:
    """The value at ``part`` of them in order."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def steady(answers: Sequence[Answer]) -> tuple[float, float]:
    """From when to when all of them were being decoded."""
    return max(answer.token_at[0] for answer in answers), min(answer.token_at[-1] for answer in answers)


def tokens_within(answers: Sequence[Answer], start: float, end: float) -> Iterator[float]:
    """When the tokens came that came between ``start`` (excluded) and ``end``."""
    return (at for answer in answers for at in answer.token_at if start < at <= end)
