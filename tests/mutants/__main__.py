"""``python -m tests.mutants [NAME…]``: takes the guards away, one at a time, and shows that a test notices each.

A test suite that is green says little about the guards that no fault of the suite ever meets. So each guard on which a
promise rests is removed once, in a copy of the tree, and some test has to go red by a violated promise. JOBS says how
many run at once. Ends non-zero unless every mutant was noticed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from tests.mutants.inventory import ALL
from tests.mutants.mutant import Mutant
from tests.mutants.trial import Bench, Judgement, Verdict, bench

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="guards, or patterns of them (emit-*); all of them")
    parser.add_argument("--seeds", type=int, default=0, help="say too which of so many simulated seeds notices first")
    options = parser.parse_args()
    chosen = [mutant for mutant in ALL if not options.names or any(fnmatch(mutant.name, n) for n in options.names)]
    if not chosen:
        parser.error(f"no guard is named {' or '.join(options.names)}")
    jobs = int(os.environ.get("JOBS") or len(os.sched_getaffinity(0)))
    with bench(ROOT) as its, ThreadPoolExecutor(jobs) as pool:
        prove_green(its, chosen, pool)
        judgements = []
        for judgement in pool.map(partial(its.judge, seeds=options.seeds), chosen):
            judgements.append(judgement)
            show_progress(judgement)
    print(table(judgements, simulated=options.seeds > 0))
    bad = [judgement for judgement in judgements if judgement.verdict is not Verdict.RED]
    for judgement in bad:
        print(f"\n{judgement.verdict} {judgement.mutant.name} ({', '.join(judgement.files)}): {judgement.why}")
    print(f"\n{len(chosen)} guards taken away, {len(chosen) - len(bad)} noticed, {len(bad)} not")
    return 1 if bad else 0


def prove_green(its: Bench, chosen: Sequence[Mutant], pool: ThreadPoolExecutor) -> None:
    """Each selected test once without a mutant, a run per file."""
    by_file: defaultdict[str, set[str]] = defaultdict(set)
    for mutant in chosen:
        for test in mutant.tests:
            by_file[test.partition("::")[0]].add(test)
    for _ in pool.map(its.prove_green, by_file.values()):
        pass


def show_progress(judgement: Judgement) -> None:
    why = judgement.why.partition("\n")[0][:80]
    print(f"{judgement.verdict:8} {judgement.seconds:5.1f} s  {judgement.mutant.name:32} {why}", flush=True)


def table(judgements: Sequence[Judgement], *, simulated: bool) -> str:
    """All of it, as Markdown."""
    rows = [["guard", "file", "promise", "red test", "s", *(["seed"] if simulated else [])]]
    for judgement in judgements:
        red = ", ".join(dict.fromkeys(test.partition("[")[0] for test in judgement.red))
        row = [judgement.mutant.name, ", ".join(judgement.files), judgement.mutant.promise, red or judgement.verdict]
        rows.append([*row, f"{judgement.seconds:.1f}", *([judgement.simulated.strip()] if simulated else [])])
    head, *body = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join(["", head, "|---" * len(rows[0]) + "|", *body])


if __name__ == "__main__":
    sys.exit(main())
