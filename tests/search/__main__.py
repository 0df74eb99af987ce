"""``python -m tests.search``: the larger searches, or those whose name contains ``--only``.

A line for each; exit status 1 where one finds a violation or does not come to its end.
"""

from __future__ import annotations

import argparse
import time

from tests.search.configuration import Configuration
from tests.search.configurations import LARGE, REST_MOST_MS, SMALL
from tests.search.search import Result, Search


def main() -> int:
    """Search; answers the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.search", description=__doc__)
    parser.add_argument("--only", default="", help="part of a name; looks among the small ones of `make test` too")
    parser.add_argument("--most-states", type=int, default=5_000_000, help="give up beyond this (default: %(default)s)")
    options = parser.parse_args()
    chosen = [one for one in (*SMALL, *LARGE) if options.only in one.name] if options.only else list(LARGE)
    if not chosen:
        parser.error(f"no configuration's name contains {options.only!r}")
    fine = [_search(configuration, options.most_states) for configuration in chosen]
    return int(not all(fine))


def _search(configuration: Configuration, most_states: int) -> bool:
    began = time.process_time()
    result = Search(configuration).run(most_states)
    cpu_s = time.process_time() - began
    problem = _problem(result)
    print(
        f"{configuration.prefill}P{configuration.decode}D {configuration.name}: {result.states:,} states, "
        f"{result.transitions:,} transitions, {cpu_s:.1f} s, to rest {result.longest_ms / 1000:g} s"
        f"{problem and ': ' + problem}",
        flush=True,
    )
    for move in result.path:
        print(f"  {move}", flush=True)
    return not problem


def _problem(result: Result) -> str:
    if result.violation:
        return result.violation
    if not result.exhausted:
        return "NOT EXHAUSTED"
    return "too far from rest" if result.longest_ms > REST_MOST_MS else ""


if __name__ == "__main__":
    raise SystemExit(main())
