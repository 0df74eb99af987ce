"""``python -m tests.mutants.seeds N``: the first of N simulated seeds that breaks a promise in the tree it runs in."""

from __future__ import annotations

import sys

from tests.sim.run import run_seed


def main(count: int) -> int:
    for seed in range(count):
        violation = run_seed(seed).violation
        if violation:
            print(f"{seed}: {violation.partition(chr(10))[0]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
