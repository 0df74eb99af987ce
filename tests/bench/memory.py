"""Memory of real workers over many requests: ``python -m tests.bench.memory [--requests N] [--num-blocks N]``.

One `baton up` with a prefill and a decode worker. Prints what each process holds once it is ready, then after every 250
short requests: eight clients, prompts of 4 to 80 tokens, answers of 1 to 16, every tenth given up after its first
token. All of them have ended when it looks.

RSS is that of /proc/PID/smaps, in MiB, in four parts:

- own: memory of the process alone: weights, Paddle's buffers, Python's objects;
- pool: its own KV pool, all pages of which are touched when it is made;
- peers: pages of other nodes' pools that it has mapped and read; they are counted at their owner, too;
- files: code and data of shared libraries, which processes share.

Target: own + pool + peers + files ≤ weights + pool + 600 MB, and no growth after the first 250 requests.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from app.kv.pool import MEMFD_NAME
from app.launcher.model_facts import model_facts
from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.integration.baton import Baton

CLIENTS = 8
EVERY = 250
OVERHEAD_MB = 600
PROMPT_TOKENS = (4, 8, 16, 30, 80)
VOCABULARY = range(100, 40_000)
MIB = 2**20
PARTS = ("own", "pool", "peers", "files")
HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ \S+ (\d+) *(.*)")


@dataclass(frozen=True)
class Resident:
    """Bytes of a process that are in memory."""

    own: int
    pool: int
    peers: int
    files: int

    @property
    def total(self) -> int:
        return self.own + self.pool + self.peers + self.files

    def __str__(self) -> str:
        parts = (self.total, self.own, self.pool, self.peers, self.files)
        return " ".join(f"{part / MIB:8.1f}" for part in parts)


def resident(pid: int) -> Resident:
    found = dict.fromkeys(PARTS, 0)
    part = "own"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := HEADER.fullmatch(line):
            rights, inode, name = match.groups()
            part = "own" if inode == "0" or "w" in rights else "files"
            if name.startswith(f"/memfd:{MEMFD_NAME}"):
                part = "pool" if "w" in rights else "peers"
        elif line.startswith("Rss:"):
            found[part] += int(line.split()[1]) * 1024
    return Resident(**found)


def requests(count: int) -> Iterator[tuple[dict[str, object], bool]]:
    """Bodies, and whether the client goes away before the end; the same in every run."""
    rng = random.Random(7)
    for number in range(count):
        prompt = rng.choices(VOCABULARY, k=rng.choice(PROMPT_TOKENS))
        answer = {"max_tokens": rng.randint(1, 16), "temperature": rng.choice([0, 1.0]), "seed": number}
        gives_up = number % 10 == 9
        if gives_up:
            answer["max_tokens"] = 64
        yield {"model": "smollm2-135m-instruct", "prompt": prompt, "stream": gives_up, **answer}, gives_up


def ask(port: int, body: dict[str, object], gives_up: bool) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if gives_up:
            answer.readline()
        else:
            answer.read()
        return answer.status
    finally:
        connection.close()


def wait_for_rest(baton: Baton) -> None:
    """Until no block and no request is held: a client that went away is noticed a little later."""

    def rests() -> bool:
        cluster = baton.get("/cluster")[1]
        pools = [node["blocks"] for node in cluster["nodes"] if node.get("blocks")]
        return not cluster["leases"] and all(pool["total"] == pool["free"] + pool["cached"] for pool in pools)

    baton.wait_for(rests, 60)


def measure(baton: Baton, count: int, targets: dict[str, float]) -> None:
    pids = {name: node["pid"] for name, node in sorted(baton.nodes().items())}
    history: dict[str, list[Resident]] = {name: [] for name in pids}

    def look(done: int) -> None:
        for name, pid in pids.items():
            history[name].append(resident(pid))
            over = "  OVER" if history[name][-1].total > targets.get(name, float("inf")) else ""
            print(f"{done:8d}  {name:10s} {history[name][-1]}{over}", flush=True)

    print("requests  process       total      own     pool    peers    files")
    look(0)
    todo = requests(count)
    with ThreadPoolExecutor(CLIENTS) as clients:
        for done in range(EVERY, count + 1, EVERY):
            some = [next(todo) for _ in range(EVERY)]
            statuses = list(clients.map(lambda each: ask(baton.port, *each), some))
            refused = sorted({status for status in statuses if status != http.client.OK})
            assert not refused, f"answered with {refused}"
            wait_for_rest(baton)
            look(done)
    for name, seen in history.items():
        grown = ", ".join(f"{part} {(getattr(seen[-1], part) - getattr(seen[1], part)) / MIB:+.1f}" for part in PARTS)
        print(f"growth after the first {EVERY}: {name:10s} {grown} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--num-blocks", type=int, default=get_settings().num_blocks)
    parser.add_argument("--kv-cache-dtype", choices=("float16", "float32"), default=get_settings().kv_cache_dtype)
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    facts = model_facts(folder.name, str(folder.path), folder.config, 2, options.kv_cache_dtype)
    pool = options.num_blocks * facts.block_bytes(settings.block_size_tokens)
    target = facts.weight_bytes + pool + OVERHEAD_MB * 10**6
    print(
        f"weights {facts.weight_bytes / MIB:.0f} MiB, pool {pool / MIB:.0f} MiB, target {target / MIB:.0f} MiB a worker"
    )
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        for shared in ("models", "kernels"):
            (home / shared).symlink_to(settings.home / shared)
        baton = Baton(
            home,
            Path(scratch) / "output",
            *("--prefill", "1", "--decode", "1", "--num-blocks", str(options.num_blocks)),
            BATON_WEIGHT_DTYPE="float16",
            BATON_KV_CACHE_DTYPE=options.kv_cache_dtype,
        )
        try:
            baton.wait_until_ready()
            measure(baton, options.requests, {"prefill1": target, "decode1": target})
        finally:
            baton.stop()


if __name__ == "__main__":
    main()
