"""``python -m tests.sim.replay SEED``: run one seed again and print what happened to the request it failed on."""

from __future__ import annotations

import argparse

from tests.sim.disasters import Disaster
from tests.sim.faults import Fault
from tests.sim.run import run_seed
from tests.sim.scenario import Kind
from tests.sim.trace import lines


def add_only(parser: argparse.ArgumentParser) -> None:
    """The option that chooses kinds of trouble."""
    parser.add_argument("--only", type=_kinds, help="only these kinds of trouble, with commas: 'node drains,bell lost'")


def _kinds(text: str) -> list[Kind]:
    known = {str(kind): kind for kind in (*Fault, *Disaster)}
    try:
        return [known[name.strip()] for name in text.split(",") if name.strip()]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"{error} is none of: {', '.join(known)}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--uid", default="", help="this request instead of the one that the violation is about")
    parser.add_argument("--node", default="", help="only what this node (p0, d0.2, ledger, …) does")
    parser.add_argument("--all", action="store_true", help="everything")
    add_only(parser)
    options = parser.parse_args(arguments)
    result = run_seed(options.seed, options.only)
    uid = "" if options.all else options.uid or result.uid
    verdict = f"seed {options.seed}: {result.violation or 'no violation'}"
    print(verdict)
    for line in lines(result.notes, uid, options.node):
        print(line)
    print(verdict)
    return 1 if result.violation else 0


if __name__ == "__main__":
    raise SystemExit(main())
