"""Which ledger commands an undisturbed request costs: ``python -m tests.bench.ledger_calls [--tokens N]``.

Counted in the simulator, with one request on a calm cluster of one prefill and one decode node. What nodes ask by the
clock (heartbeats, holdings, scans, claims and reservations that find nothing) is counted apart, per second.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from typing import Any

from app.protocol.commands import Limits, ReserveAnswer
from app.schemas import SamplingParams
from tests.sim.client import Wish
from tests.sim.pace import Slowness
from tests.sim.scenario import Shape, draw_scenario
from tests.sim.world import World

START_S = 2.0
"""The cluster is up and quiet by then."""
LIMITS = Limits(3, 100, 60_000, 60_000, 600_000)


def calm_world(tokens: int) -> World:
    """One request of ``tokens`` tokens, and nothing that could disturb it."""
    sampling = SamplingParams(seed=1, max_tokens=tokens, ignore_eos=True)
    wish = Wish(START_S, "w0", "client", tuple(range(1, 17)), sampling, LIMITS)
    shape = Shape(num_blocks=1_000)
    return World(
        replace(
            draw_scenario(1),
            nodes={"p0": shape, "d0": shape},
            webs=1,
            wishes=(wish,),
            poison=frozenset(),
            rates={},
            disasters=(),
            slowness=Slowness(),
        )
    )


def count(tokens: int) -> tuple[Counter[str], Counter[str], float]:
    """Commands that name the request, the others, and how many seconds those took."""
    world = calm_world(tokens)
    mine: Counter[str] = Counter()
    others: Counter[str] = Counter()
    apply = world.ledger.apply

    def counted(who: str, command: Any, not_after_ms: int) -> Any:
        answer = apply(who, command, not_after_ms)
        got = getattr(answer, "work", None) or (isinstance(answer, ReserveAnswer) and answer.uid)
        (mine if getattr(command, "uid", "") or got else others)[command.name] += 1
        return answer

    world.ledger.apply = counted  # type: ignore[method-assign]
    world.run(START_S - 0.1)
    others.clear()
    seconds = 10.0 + tokens
    world.run(START_S - 0.1 + seconds)
    if world.outcomes.total() != 1:
        raise RuntimeError(f"the request has not ended: {world.outcomes}")
    return mine, others, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    few, _, _ = count(options.tokens)
    many, others, seconds = count(2 * options.tokens)
    print(f"a request of {options.tokens} tokens: {few.total()} calls: {dict(few)}")
    print(f"each further token: {(many.total() - few.total()) / options.tokens:.2f} calls")
    per_second = {name: round(number / seconds, 1) for name, number in others.items()}
    print(f"by the clock, per second, of 2 nodes, 1 web, control and beat: {per_second}")


if __name__ == "__main__":
    main()
