"""What the pipeline costs beside the engine: ``python -m tests.bench.pipeline [--rounds N] [--clients N ...]``.

One prefill and one decode worker with one thread each, none borrowed. Each round, for each number of clients: the bare
engine decodes as many sequences on one thread, while the cluster rests; then as many clients stream, and the tokens are
counted that come while all of them are being decoded. CPU time is that of all of the cluster's threads but the busiest
of each worker, which is the engine's, over the whole of the clients' requests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from app.model.resolve import resolve_model
from app.settings import get_settings
from tests.bench.load import ask_at_once, draw_prompt, steady, tokens_within
from tests.bench.peers.talking import Talking
from tests.bench.rounds import Row
from tests.integration.baton import Baton, share_caches

PROMPT_TOKENS = 64
ANSWER_TOKENS = 192
BARE_STEPS = 48
BARE_CONTEXT = PROMPT_TOKENS + ANSWER_TOKENS // 2 - BARE_STEPS // 2
"""So that both decode at the same length on average."""
BARE, PIPELINE, CPU_MS, STEP_MS = "bare engine", "pipeline", "CPU ms per token", "added ms per token"


Spent = dict[str, dict[int, float]]
"""CPU seconds of the threads of each process."""


def spent_s(baton: Baton) -> Spent:
    spent: Spent = {}
    for number, process in enumerate(baton.processes()):
        words = process.cmdline()
        name = next((word.split("@")[0] for word in words if "@" in word), None) or next(
            (each for each in ("gunicorn", "valkey", "flower", "beat") if any(each in word for word in words)),
            f"other{number}",
        )
        threads = spent.setdefault(name, {})
        threads.update({thread.id: thread.user_time + thread.system_time for thread in process.threads()})
    return spent


def outside_engines_s(before: Spent, after: Spent) -> dict[str, float]:
    """CPU seconds by process, without the thread of each worker that was busiest: its engine's."""
    outside = {}
    for name, threads in after.items():
        took = sorted(now - before.get(name, {}).get(thread, 0.0) for thread, now in threads.items())
        outside[name] = sum(took[:-1] if name.startswith(("prefill", "decode")) else took)
    return outside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="*", default=(1, 8, 32))
    options = parser.parse_args()
    settings = get_settings()
    folder = resolve_model(settings.model, settings.home, print)
    rows = [Row(f"{clients} clients", "tok/s") for clients in options.clients]
    parts: dict[str, list[float]] = {}
    source = random.Random(1)
    bare = Talking(BARE, [sys.executable, "-m", "tests.bench.peers.baton_peer", "1"])
    with tempfile.TemporaryDirectory() as name, bare:
        home = Path(name)
        share_caches(home, folder.path.parent)
        baton = Baton(
            home,
            home / "output",
            BATON_BORROW_THREADS="false",
            BATON_NUM_THREADS="1",
            BATON_WEIGHT_DTYPE=settings.weight_dtype,
        )
        try:
            baton.wait_until_ready()
            model = folder.name
            ask_at_once(baton.port, model, [[draw_prompt(PROMPT_TOKENS, source)]], 8)
            for number in range(options.rounds):
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
                for row, clients in zip(rows, options.clients, strict=True):
                    row.add(BARE, bare.decode_tokens_per_s(clients, BARE_CONTEXT, BARE_STEPS))
                    before = spent_s(baton)
                    prompts = [[draw_prompt(PROMPT_TOKENS, source)] for _ in range(clients)]
                    answers = ask_at_once(baton.port, model, prompts, ANSWER_TOKENS)
                    spent = outside_engines_s(before, spent_s(baton))
                    start, end = steady(answers)
                    row.add(PIPELINE, len(list(tokens_within(answers, start, end))) / (end - start))
                    tokens = clients * ANSWER_TOKENS
                    each = {name: 1000 * seconds / tokens for name, seconds in spent.items()}
                    row.add(CPU_MS, sum(each.values()))
                    row.add(STEP_MS, 1000 * clients * (1 / row.seen[PIPELINE][-1] - 1 / row.seen[BARE][-1]))
                    for part, value in each.items():
                        parts.setdefault(f"{row.name}: {part}", []).append(value)
        finally:
            baton.stop()
    print(f"{folder.name}, one thread each, {ANSWER_TOKENS} tokens an answer, medians of {options.rounds} rounds")
    for row in rows:
        print(
            f"{row.name:>10}: bare {row.median(BARE):6.1f} tok/s, pipeline {row.median(PIPELINE):6.1f} tok/s,"
            f" ratio {row.ratio(PIPELINE, BARE):.3f}, added per token {row.median(STEP_MS):5.2f} ms,"
            f" CPU outside the engines {row.median(CPU_MS):.3f} ms per token"
        )
    for part, values in parts.items():
        print(f"    {part:30} {statistics.median(values):.3f} ms per token")


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"took {time.perf_counter() - started:.0f} s", file=sys.stderr)
