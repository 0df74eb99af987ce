"""A rolling restart of every process under load: ``python -m tests.chaos.rolling [--prefill N] [--decode N]``.

Clients send one request after the other, streamed and not, on new connections and on kept ones, and never try again.
Meanwhile ``baton restart`` runs. Prints how many answers were the reference's, token by token, and what went wrong with
the others; exit status 1 unless all were exact and every process was replaced.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from app.launcher.plan import SOURCE_ROOT
from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.integration.baton import Baton, share_caches

REFERENCES = Path(__file__).parents[1] / "references" / "greedy_reference.json"
CLIENTS = 4
REQUEST_TIMEOUT_S = 300.0


@dataclass
class Tally:
    """What became of the requests."""

    exact: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.exact + self.wrong.total()

    def add(self, outcome: str, took_s: float) -> None:
        """``outcome``: empty if it was exact."""
        self.longest_s = max(self.longest_s, took_s)
        if outcome:
            self.wrong[outcome] += 1
        else:
            self.exact += 1


class Client:
    """Sends one request after the other until it is told to stop."""

    def __init__(self, port: int, number: int, tally: Tally, lock: threading.Lock, stop: threading.Event) -> None:
        self._port = port
        self._number = number
        self._tally = tally
        self._lock = lock
        self._stop = stop
        self._streams, self._keeps = bool(number % 2), bool(number // 2 % 2)
        self._kept: http.client.HTTPConnection | None = None

    def run(self) -> None:
        cases: list[dict[str, Any]] = json.loads(REFERENCES.read_text())
        turn = self._number
        while not self._stop.is_set():
            began_at = time.monotonic()
            try:
                outcome = self._ask(cases[turn % len(cases)])
            except (OSError, http.client.HTTPException, ValueError) as error:
                outcome, self._kept = f"{type(error).__name__}: {error}", None
            with self._lock:
                self._tally.add(outcome, time.monotonic() - began_at)
            turn += 1
        if self._kept is not None:
            self._kept.close()

    def _connection(self) -> http.client.HTTPConnection:
        """Kept ones are used again unless the server said that it closes them."""
        if self._kept is None or self._kept.sock is None:
            self._kept = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT_S)
        return self._kept

    def _ask(self, case: dict[str, Any]) -> str:
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": case["prompt_ids"],
            "max_tokens": len(case["output_ids"]),
            "temperature": 0,
            "stream": self._streams,
            "return_token_ids": True,
        }
        connection = self._connection()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        read = answer.read().decode()
        if not self._keeps:
            connection.close()
        if answer.status != http.client.OK:
            return f"status {answer.status}: {read}"
        return self._compare(read, case["output_ids"])

    def _compare(self, read: str, expected: list[int]) -> str:
        events = [line[6:] for line in read.splitlines() if line.startswith("data: ")] if self._streams else [read]
        if self._streams and events[-1:] != ["[DONE]"]:
            return f"the stream ended with {events[-1:]}"
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
        return "" if ids == expected else f"other tokens: {ids} instead of {expected}"


@contextmanager
def load(port: int) -> Iterator[Tally]:
    """Clients that send for as long as the block lasts; their last answers are waited for."""
    tally, lock, stop = Tally(), threading.Lock(), threading.Event()
    threads = [threading.Thread(target=Client(port, n, tally, lock, stop).run) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield tally
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def processes(baton: Baton) -> dict[int, str]:
    """Everything below the launcher that a restart replaces: by pid. gunicorn's arbiter and Valkey stay."""
    found = {}
    for child in psutil.Process(baton.process.pid).children(recursive=True):
        line = " ".join(child.cmdline())
        is_arbiter = "gunicorn" in line and child.ppid() == baton.process.pid
        if not is_arbiter and "valkey" not in line and "ledger_child" not in line:
            found[child.pid] = line
    return found


def restart(baton: Baton) -> None:
    """``baton restart``, as a person runs it; its lines are printed."""
    command = [sys.executable, "-m", "app.cli", "restart", "--home", str(baton.home)]
    subprocess.run(command, cwd=SOURCE_ROOT, check=True)


def roll(baton: Baton) -> Tally:
    """Restart every process of a cluster under load.

    Raises:
        RuntimeError: a process was not replaced.
    """
    before = processes(baton)
    with load(baton.port) as tally:
        baton.wait_for(lambda: tally.requests >= 2 * CLIENTS, REQUEST_TIMEOUT_S)
        restart(baton)
        done = tally.requests
        baton.wait_for(lambda: tally.requests >= done + CLIENTS, REQUEST_TIMEOUT_S)
    after = processes(baton)
    left = [line for pid, line in before.items() if pid in after]
    if left or len(after) != len(before):
        raise RuntimeError(f"not replaced: {left}; {len(before)} processes before, {len(after)} after")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", default="2")
    parser.add_argument("--decode", default="2")
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        share_caches(home, folder.path.parent)
        nodes = ("--prefill", options.prefill, "--decode", options.decode, "--num-blocks", "64")
        baton = Baton(home, home / "output", *nodes, BATON_QUEUE_TIMEOUT_S="300")
        try:
            baton.wait_until_ready()
            began_at = time.monotonic()
            tally = roll(baton)
        finally:
            baton.stop()
    failed = tally.wrong.total()
    print(f"rolling restart of {options.prefill} prefill, {options.decode} decode workers and all services under load:")
    print(f"{time.monotonic() - began_at:.0f} s, {tally.requests} requests, {tally.exact} exact, {failed} failed")
    print(f"the longest took {tally.longest_s:.1f} s")
    for what, count in tally.wrong.most_common():
        print(f"  {count} x {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
