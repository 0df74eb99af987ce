"""Goodput at capacity and at three times as much load: ``python -m tests.bench.overload [--rounds N] [--seconds S]``.

One cluster of one prefill and one decode worker. Rounds alternate: as many clients as keep both busy, each sending its
next request when its last one is answered; then arrivals at three times the rate that these were served at, whatever
becomes of them. Goodput is tokens of requests that were answered whole, per second, after a round's first third.

A prefill is wasted when its attempt was never activated by a decode worker; both workers' logs say.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.integration.baton import Baton

PROMPT_TOKENS = 64
ANSWER_TOKENS = 16
MAX_NUM_SEQS = 8
CLIENTS = 2 * MAX_NUM_SEQS
"""At 1x: so many that the decode worker's batch is always full."""
OVERLOAD = 3
MAX_QUEUED = 24
QUEUE_TIMEOUT_S = 4.0
"""With the queue this long its end is never reached in time: a round sees both 429 and 503."""


@dataclass
class Round:
    """What became of the requests of one round. Appending is atomic; the clock is monotonic, in seconds."""

    seconds: float
    began_at: float = field(default_factory=time.monotonic)
    finished: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)

    @property
    def ends_at(self) -> float:
        return self.began_at + self.seconds

    @property
    def goodput(self) -> float:
        """Tokens per second, once the batch is full."""
        measured_s = self.seconds * 2 / 3
        return ANSWER_TOKENS * sum(self.ends_at - measured_s < at <= self.ends_at for at in self.finished) / measured_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends_at

    def ask(self, port: int, prompt: list[int]) -> None:
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
        if answer.status == http.client.OK:
            self.finished.append(time.monotonic())
        else:
            self.refused[answer.status] += 1


def draw(source: random.Random) -> list[int]:
    return [source.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


def at_capacity(port: int, seconds: float, source: random.Random) -> Round:
    """Each client sends its next request when its last one is answered."""
    result = Round(seconds)

    def run() -> None:
        while not result.over:
            result.ask(port, draw(source))

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


def overloaded(port: int, seconds: float, source: random.Random, per_s: float) -> Round:
    """Requests arrive at this rate, after a burst that fills the queue; none is sent again."""
    result = Round(seconds)
    threads: list[threading.Thread] = []
    clock = threading.Event()
    due = time.monotonic()
    while not result.over:
        threads.append(threading.Thread(target=result.ask, args=(port, draw(source))))
        threads[-1].start()
        due += source.expovariate(per_s) if len(threads) > CLIENTS + MAX_QUEUED else 0.0
        clock.wait(max(0.0, due - time.monotonic()))
    for thread in threads:
        thread.join()
    return result


def wasted(baton: Baton) -> tuple[int, int]:
    """How many prompts were computed, and how many of those no decode worker ever took over."""
    pattern = r"{} .*?uid=(\S+) .*?attempt=(\d+)"
    prefilled = re.findall(pattern.format(" prefilled"), baton.log("prefill1").read_text())
    activated = re.findall(pattern.format(" activated"), baton.log("decode1").read_text())
    return len(prefilled), len(set(prefilled) - set(activated))


def measure(baton: Baton, rounds: int, seconds: float) -> tuple[list[Round], list[Round]]:
    source = random.Random(1)
    at_capacity(baton.port, seconds / 2, source)  # warm-up
    peak, over = [], []
    for _ in range(rounds):
        peak.append(at_capacity(baton.port, seconds, source))
        over.append(overloaded(baton.port, seconds, source, OVERLOAD * peak[-1].goodput / ANSWER_TOKENS))
        print(f"  1x {peak[-1].goodput:6.1f} tok/s   3x {over[-1].goodput:6.1f} tok/s  {dict(over[-1].refused)}")
    return peak, over


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "models").symlink_to(folder.path.parent)
        limits = ("--max-queued", str(MAX_QUEUED), "--queue-timeout-s", str(QUEUE_TIMEOUT_S))
        size = ("--num-blocks", "128", "--max-num-seqs", str(MAX_NUM_SEQS))
        baton = Baton(home, home / "output", *limits, *size)
        try:
            baton.wait_until_ready()
            peak, over = measure(baton, options.rounds, options.seconds)
            computed, lost = wasted(baton)
        finally:
            baton.stop()
    medians = [statistics.median(each.goodput for each in kind) for kind in (peak, over)]
    share = statistics.median(b.goodput / a.goodput for a, b in zip(peak, over, strict=True))
    refused: Counter[int] = sum((each.refused for each in over), Counter())
    print(
        f"{options.rounds} rounds of {options.seconds:g} s each, {PROMPT_TOKENS} + {ANSWER_TOKENS} tokens per request"
    )
    print(f"goodput at 1x  p50 {medians[0]:6.1f} tok/s;  at {OVERLOAD}x  p50 {medians[1]:6.1f} tok/s")
    print(f"at {OVERLOAD}x as a share of the round before it  p50 {100 * share:.0f} %")
    print(f"refused at {OVERLOAD}x: {refused[429]} with 429, {refused[503]} with 503, {refused.total()} in all")
    print(f"{computed} prompts computed, {lost} of them in vain")
    return 0 if lost == 0 and share >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
