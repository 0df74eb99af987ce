"""``python -m tests.sim.soak --seeds N``: as many seeds as one likes, on all cores; exit status 1 on any violation."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from tests.sim.replay import add_only
from tests.sim.run import Result, run_seed
from tests.sim.scenario import Kind

_CHUNK = 50
_COLLECT_EVERY = 20
_SAY_EVERY_S = 10.0


@dataclass(slots=True)
class Total:
    """What came of many seeds."""

    seeds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    failed: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Total) -> None:
        self.seeds += other.seeds
        self.outcomes += other.outcomes
        self.counts += other.counts
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.failed += other.failed


def run_seeds(seeds: Iterable[int], only: Sequence[Kind] | None = None) -> Total:
    """Run some seeds in this process."""
    total, started = Total(), time.process_time()
    gc.disable()  # a fifth of the time; a world is garbage as a whole
    for number, seed in enumerate(seeds):
        _add(total, run_seed(seed, only))
        if number % _COLLECT_EVERY == 0:
            gc.collect()
    gc.enable()
    total.cpu_s = time.process_time() - started
    return total


def _add(total: Total, result: Result) -> None:
    total.seeds += 1
    total.outcomes += result.outcomes
    total.counts += result.counts
    total.virtual_s += result.virtual_s
    if result.violation:
        total.failed.append((result.seed, result.violation.splitlines()[0]))


def run_everywhere(first: int, count: int, jobs: int, only: Sequence[Kind] | None = None) -> Iterator[Total]:
    """Run seeds on ``jobs`` processes; yields what each chunk came to, in order."""
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)]
    run = partial(run_seeds, only=only)
    if jobs == 1:
        yield from map(run, chunks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, chunks)


def table(title: str, counts: Counter[str]) -> str:
    """``counts``, the most frequent first."""
    width = max(map(len, counts), default=0)
    total = counts.total()
    rows = [f"  {name:<{width}}  {count:>9,}  {100 * count / total:5.1f} %" for name, count in counts.most_common()]
    return "\n".join([f"{title} ({total:,}):", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one per core")
    add_only(parser)
    options = parser.parse_args()
    jobs = options.jobs or len(os.sched_getaffinity(0))
    total, started, said = Total(), time.monotonic(), time.monotonic()
    for part in run_everywhere(options.first, options.seeds, jobs, options.only):
        total.add(part)
        for seed, violation in part.failed:
            print(f"seed {seed}: {violation}", flush=True)
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            print(f"{total.seeds} of {options.seeds} seeds, {len(total.failed)} violations", flush=True)
    minutes = (time.monotonic() - started) / 60
    print(table("requests by outcome", total.outcomes))
    print(table("what struck, and what came of it", total.counts))
    print(
        f"{total.seeds:,} seeds, {total.virtual_s / 3600:,.1f} virtual hours in {minutes:.1f} minutes on {jobs} cores: "
        f"{total.seeds / minutes:,.0f} seeds per minute, {60 * total.seeds / total.cpu_s:,.0f} per minute of one core"
    )
    for seed, violation in total.failed:
        again = f" --only {shlex.quote(','.join(options.only))}" if options.only is not None else ""
        print(f"VIOLATION  seed {seed}: {violation}\n  python -m tests.sim.replay {seed}{again}")
    print(f"{len(total.failed)} violations")
    return 1 if total.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
