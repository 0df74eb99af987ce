"""Does a starved machine lose nodes by mistake? ``python -m tests.chaos.starved`` (``--help`` says what can be set).

Starts a cluster of one prefill and one decode worker, lets two processes per core do nothing but spin for a while, and
keeps requests going meanwhile, each compared with its reference. Ends with 1 if an answer was wrong or an error. A
node-ttl-s that is far too short shows what such a mistake costs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.integration.baton import Baton, share_caches

HOGS_PER_CORE = 2
REFERENCES = Path(__file__).parents[1] / "references" / "greedy_reference.json"
ANSWER_TOKENS = 16
LOOK_S = 0.2
AFTER_S = 15.0
"""Time for whatever was lost to come back."""


@contextmanager
def starved() -> Iterator[None]:
    """The cores are busy elsewhere."""
    argv = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(argv) for _ in range(HOGS_PER_CORE * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def outcome(baton: Baton, case: dict[str, Any]) -> str:
    """How one request ended: ``exact``, ``wrong``, or an error by its name."""
    body = {"prompt": case["prompt_ids"], "max_tokens": ANSWER_TOKENS, "temperature": 0, "return_token_ids": True}
    try:
        status, _, answer = baton.post("/v1/completions", body | {"model": "smollm2-135m-instruct"})
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    if status != http.client.OK:
        return f"{status} {answer['error']['code']}"
    return "exact" if answer["choices"][0]["token_ids"] == case["output_ids"][:ANSWER_TOKENS] else "wrong"


class Watch:
    """What ``/cluster`` says while the machine is busy."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self.oldest_beat_s = 0.0
        self.longest_look_s = 0.0
        self.unready = 0
        self.looks = 0

    def look(self) -> None:
        began = time.monotonic()
        try:
            nodes = self._baton.get("/cluster")[1]["nodes"]
            self.unready += not self._baton.is_ready()
        except (OSError, http.client.HTTPException, KeyError):
            self.unready += 1
        else:
            self.oldest_beat_s = max(self.oldest_beat_s, *(node["heartbeat_age_s"] for node in nodes))
        self.looks += 1
        self.longest_look_s = max(self.longest_look_s, time.monotonic() - began)


def declared_dead(baton: Baton) -> int:
    """How often a process of the cluster was told that the ledger no longer knows it."""
    return sum(log.read_text().count("no longer registered") for log in baton.log("web").parent.glob("*.log*"))


def run(baton: Baton, seconds: float, clients: int, node_ttl_s: float) -> Counter[str]:
    cases: list[dict[str, Any]] = json.loads(REFERENCES.read_text())
    numbers = count()
    until = 0.0
    done = threading.Event()
    watch = Watch(baton)

    def ask_on() -> list[str]:
        outcomes = []
        while time.monotonic() < until:
            outcomes.append(outcome(baton, cases[next(numbers) % len(cases)]))
        return outcomes

    def look_on() -> None:
        while not done.wait(LOOK_S):
            watch.look()

    with ThreadPoolExecutor(clients + 1) as pool:
        looking = pool.submit(look_on)
        until = time.monotonic() + seconds
        with starved():
            asking = [pool.submit(ask_on) for _ in range(clients)]
            done.wait(until - time.monotonic())
        found = Counter(one for answers in asking for one in answers.result())
        baton.wait_for(baton.is_ready, AFTER_S)
        done.set()
        looking.result()
    print(f"/cluster and /ready   {watch.looks} looks, {watch.unready} not ready, longest {watch.longest_look_s:.2f} s")
    print(f"oldest heartbeat      {watch.oldest_beat_s:.2f} s (a node is lost after {node_ttl_s:g} s)")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=4)
    settings = get_settings()
    parser.add_argument("--node-ttl-s", type=float, default=settings.node_ttl_s)
    options = parser.parse_args()
    folder = resolve_model(settings.model, settings.home, print)
    with tempfile.TemporaryDirectory() as folder_name:
        home = Path(folder_name)
        share_caches(home, folder.path.parent)
        ttl = {"BATON_NODE_TTL_S": str(options.node_ttl_s)}
        baton = Baton(home, home / "output", "--num-blocks", "128", **ttl)
        try:
            baton.wait_until_ready()
            print(f"load before           {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
            found = run(baton, options.seconds, options.clients, options.node_ttl_s)
            dead, restarts, ready = declared_dead(baton), baton.text.count(" started again"), baton.is_ready()
        finally:
            baton.stop()
    errors = {name: times for name, times in found.items() if name != "exact"}
    print(f"requests              {sum(found.values())}: {found['exact']} exact, errors {errors or 0}")
    print(f"nodes declared dead   {dead}")
    print(f"restarts              {restarts}")
    print(f"ready at the end      {ready}")
    return 0 if ready and not errors else 1


if __name__ == "__main__":
    sys.exit(main())
