"""Random faults under load: ``python -m tests.chaos.soak --minutes 10``. Ends with status 1 if a promise was broken.

Clients keep a cluster of two prefill and two decode workers busy. Every few seconds a worker is killed (seen by its
supervisor or not), frozen or cut off from its peers, at a random moment or exactly at a random step of a request; or a
pull is given wrong bytes. One node of each role is left alone, so that there is somewhere to go on.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.model.resolve import resolve_model
from app.settings import load_settings
from tests.chaos.clients import GREEDY, Expected, Stream, greedy, sampled, undisturbed
from tests.chaos.injector import Injector
from tests.chaos.stack import Stack
from tests.integration.baton import share_caches

CLIENTS = 6
TOKENS = (4, 24)
HANGS_S = 150.0
"""Longer than the queue's timeout and an answer take together: a request without an end by then has none."""


class Load:
    """Clients that send one request after the other, and what became of them."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack = stack
        self._seed = seed
        self._known: list[tuple[dict[str, Any], Expected]] = []
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def start(self) -> None:
        """Have the answers of an undisturbed cluster, then begin."""
        for case, tokens in itertools.product(range(len(GREEDY)), TOKENS):
            self._learn(greedy(case, min(tokens, len(GREEDY[case]["output_ids"]))))
            assert self._known[-1][1].token_ids == GREEDY[case]["output_ids"][:tokens]
        for case in range(len(GREEDY)):
            self._learn(sampled(case, self._seed + case, max(TOKENS)))
        for thread in self._threads:
            thread.start()

    def _learn(self, request: dict[str, Any]) -> None:
        self._known.append((request, undisturbed(self._stack.baton, request)))

    def stop(self) -> None:
        """Let every request come to its end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            request, expected = self._random.choice(self._known)
            stream = Stream(self._stack.baton, self._stack.name("soak"), request).start()
            hung = not stream.ended.wait(HANGS_S)
            if hung:
                self.outcomes["hung"] += 1
                print(f"HUNG: {stream.request_id}", flush=True)
            elif stream.error:
                self.outcomes["error"] += 1
                self.errors[stream.error] += 1
                self._check_part(stream, expected)
                self._stopping.wait(0.5)
            else:
                self._check(stream, expected)

    def _check(self, stream: Stream, expected: Expected) -> None:
        exact = stream.exact and stream.answer() == expected
        self.outcomes["exact" if exact else "wrong"] += 1
        if not exact:
            print(f"WRONG: {stream.request_id} {stream.answer()}, not {expected}", flush=True)

    def _check_part(self, stream: Stream, expected: Expected) -> None:
        """What came before an error must be exact too."""
        if stream.token_ids != expected.token_ids[: len(stream.token_ids)]:
            self.outcomes["wrong"] += 1
            print(f"WRONG: {stream.request_id} {stream.token_ids} before {stream.error}", flush=True)


def soak(stack: Stack, minutes: float, seed: int) -> bool:
    """Run it and print what came of it. Whether every promise was kept."""
    load, injector = Load(stack, seed), Injector(stack, random.Random(seed))
    load.start()
    began_at = time.monotonic()
    injector.run_until(began_at + 60 * minutes)
    load.stop()
    leaks = settle(stack)
    outcomes = load.outcomes
    recoveries = sorted(injector.recoveries)
    print(f"{sum(injector.faults.values())} faults in {minutes:g} minutes, seed {seed}: {_listed(injector.faults)}")
    print(f"requests       {outcomes.total()}")
    print(f"exact          {outcomes['exact']}")
    print(f"errors         {outcomes['error']}  {_listed(load.errors)}")
    print(f"wrong          {outcomes['wrong']}")
    print(f"hung           {outcomes['hung']}")
    print(f"leaked         {len(leaks)}  {'; '.join(leaks)}")
    print(
        f"from fault to recovery of {len(recoveries)} requests: p50 {_part(recoveries, 0.5)}, "
        f"p99 {_part(recoveries, 0.99)}, max {_part(recoveries, 1.0)}"
    )
    return not (outcomes["wrong"] or outcomes["hung"] or leaks)


def settle(stack: Stack) -> list[str]:
    """What is still in use when everything has had the time to come back."""
    try:
        stack.wait_idle()
    except AssertionError as error:
        return [str(error)]
    return []


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _part(values: Sequence[float], part: float) -> str:
    return f"{1000 * values[min(len(values) - 1, int(part * len(values)))]:.0f} ms" if values else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults under load.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    models = resolve_model("smollm2-135m-instruct", load_settings().home, print).path.parent
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        share_caches(folder / "home", models)
        stack = Stack(folder / "home", folder)
        try:
            stack.start()
            return 0 if soak(stack, arguments.minutes, arguments.seed) else 1
        finally:
            stack.close()


if __name__ == "__main__":
    sys.exit(main())
