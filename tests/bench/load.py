"""Clients that stream answers, and when each of their tokens came."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TIMEOUT_S = 300.0


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


def ask(port: int, model: str, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Stream one answer of exactly ``max_tokens`` tokens.

    Raises:
        RuntimeError: it was refused, or ended with an error.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        answer = Answer(time.perf_counter())
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
        for line in response:
            if b'"token_ids":[' in line and b'"token_ids":[]' not in line:
                now = time.perf_counter()
                answer.token_at += [now] * len(json.loads(line[6:])["choices"][0]["token_ids"])
            elif line.startswith(b'data: {"error"'):
                raise RuntimeError(line.decode())
    finally:
        connection.close()
    if len(answer.token_at) != max_tokens:
        raise RuntimeError(f"{len(answer.token_at)} tokens came, {max_tokens} were asked for")
    return answer


def ask_at_once(port: int, model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """One client for each prompt. Raises what the first that failed did."""
    answers: list[Answer] = []
    errors: list[Exception] = []

    def run(prompt: Sequence[int]) -> None:
        try:
            answers.append(ask(port, model, prompt, max_tokens))
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return answers


def steady(answers: Sequence[Answer]) -> tuple[float, float]:
    """From when to when all of them were being decoded."""
    return max(answer.token_at[0] for answer in answers), min(answer.token_at[-1] for answer in answers)


def tokens_within(answers: Sequence[Answer], start: float, end: float) -> Iterator[float]:
    """When the tokens came that came between ``start`` (excluded) and ``end``."""
    return (at for answer in answers for at in answer.token_at if start < at <= end)
