"""One request of a chaos test, on a thread of its own, and whether it ended as a request may end."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from tests.chaos.clients import GREEDY, greedy

_SOCKET_TIMEOUT_S = 120.0


class Asked:
    """A greedy completion of one of the references, cut to ``max_tokens``.

    ``problem`` is what must never be: other tokens, an end without a word, a word after the end.
    """

    def __init__(self, port: int, case: int, max_tokens: int, *, streams: bool) -> None:
        self._port = port
        self._body = greedy(case, max_tokens) | {"stream": streams}
        self.streams = streams
        self.expected: list[int] = GREEDY[case]["output_ids"][:max_tokens]
        self.token_ids: list[int] = []
        self.error = ""
        """The explicit error that it ended with: type, code and message."""
        self.problem = ""
        self.longest_silence_s = 0.0
        """Between two lines, pings too; of one that does not stream, all of it."""
        self.began_at = self.ended_at = self._heard_at = time.monotonic()
        self.ended = threading.Event()
        self._done = False
        threading.Thread(target=self._run, name=f"asked-{case}", daemon=True).start()

    @property
    def exact(self) -> bool:
        """Whether it has ended as an undisturbed run would have."""
        return self.ended.is_set() and not (self.error or self.problem)

    def __repr__(self) -> str:
        end = self.problem or self.error or ("exact" if self.ended.is_set() else "no end yet")
        kind = "stream" if self.streams else "whole"
        took_s = (self.ended_at if self.ended.is_set() else time.monotonic()) - self.began_at
        return f"<{kind}, {len(self.token_ids)} of {len(self.expected)} tokens, {took_s:.1f} s: {end}>"

    def _run(self) -> None:
        try:
            self._ask()
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.problem = f"no explicit end: {type(error).__name__}: {error}"
        self._hear()
        if not self.problem:
            self._judge()
        self.ended_at = time.monotonic()
        self.ended.set()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_SOCKET_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                self._refused(answer.status, json.loads(answer.read()))
            elif self.streams:
                for line in answer:
                    self._hear()
                    self._take(line.decode().strip())
            else:
                self._take_chunk(json.loads(answer.read()))
                self._done = True
        finally:
            connection.close()

    def _hear(self) -> None:
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self._heard_at)
        self._heard_at = now

    def _refused(self, status: int, answer: dict[str, Any]) -> None:
        self._take_error(answer["error"])
        if status != http.client.SERVICE_UNAVAILABLE:
            self.problem = f"status {status}: {answer}"

    def _take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if self._done or self.error:
            self.problem = f"something came after the end: {line}"
        elif line == "data: [DONE]":
            self._done = True
        else:
            self._take_chunk(json.loads(line[6:]))

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self._take_error(chunk["error"])
            return
        self.token_ids += chunk["choices"][0].get("token_ids") or []

    def _take_error(self, error: dict[str, Any]) -> None:
        self.error = f"{error['type']} {error['code']}: {error['message']}"

    def _judge(self) -> None:
        """An error may come after any of the right tokens; an answer has them all."""
        known = self.expected[: len(self.token_ids)] if self.error else self.expected
        if self.token_ids != known:
            self.problem = f"other tokens: {self.token_ids} instead of {known}"
        elif not (self._done or self.error):
            self.problem = "the stream ended without a word"
