"""Scenarios whose decode nodes are far too small for what their clients want at once: preemption is the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tests.sim.model import BLOCK_TOKENS
from tests.sim.scenario import Kind, Scenario, Shape, draw_scenario
from tests.sim.times import MOST_BLOCKS

_NO_END_S = 300.0


def draw_crowd(seed: int, only: Sequence[Kind] | None = None) -> Scenario:
    """The cluster of ``seed`` with small pools, and a burst of long answers from clients that stay to the end."""
    scenario = draw_scenario(seed, only)
    rng = Random(f"{seed}/crowd")
    num_blocks = rng.choice((6, 8, 12))
    most = num_blocks * BLOCK_TOKENS
    moment = rng.uniform(0.3, 2.0)
    first = scenario.wishes[0]
    wishes = []
    for number in range(rng.choice((8, 16, 24))):
        length = rng.randrange(1, 12)
        sampling = {"max_tokens": rng.randrange(most // 2, most - length + 1), "ignore_eos": True, "seed": number}
        wishes.append(
            replace(
                first,
                at_s=moment + 0.3 * rng.random(),
                web=f"w{rng.randrange(scenario.webs)}",
                client_id=f"r{number}",
                prompt=tuple(rng.randrange(1, 1000) for _ in range(length)),
                sampling=first.sampling.model_copy(update=sampling),
                limits=replace(
                    first.limits,
                    max_attempts=3,
                    max_queued=100,
                    queue_timeout_ms=round(1000 * _NO_END_S),
                    first_token_timeout_ms=round(1000 * _NO_END_S),
                    grace_ms=0,
                ),
                leaves_after_s=None,
                cancels_after_s=None,
                key="",
                then=None,
            )
        )
    shape = next(iter(scenario.nodes.values()))
    small = Shape(num_blocks, 8, 16, shape.emit_buffer_tokens)
    large = replace(small, num_blocks=rng.choice((num_blocks, MOST_BLOCKS)))
    return replace(
        scenario,
        nodes={name: small if name.startswith("d") else large for name in scenario.nodes},
        wishes=tuple(wishes),
        poison=frozenset(),
        times=replace(scenario.times, queue_timeout_s=_NO_END_S, first_token_timeout_s=_NO_END_S),
    )
