"""Scenarios whose clients ask for several answers at once: to one prompt (``n``), or to several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from app.schemas import SamplingParams
from tests.sim.client import Wish
from tests.sim.scenario import Kind, Scenario, draw_scenario

MOST_SEQUENCES = 5


def draw_groups(seed: int, only: Sequence[Kind] | None = None) -> Scenario:
    """The scenario of ``seed``, most of its requests with more than one sequence."""
    scenario = draw_scenario(seed, only)
    rng = Random(f"{seed}/groups")
    shapes: dict[str, list[int]] = {}
    return replace(scenario, wishes=tuple(_grown(rng, wish, shapes) for wish in scenario.wishes))


def _grown(rng: Random, wish: Wish, shapes: dict[str, list[int]]) -> Wish:
    """Sent again under its key it has the same body: what is drawn once for a key holds for all."""
    then = wish.then and _grown(rng, wish.then, shapes)
    drawn = [rng.randrange(4) for _ in range(rng.randrange(MOST_SEQUENCES))]
    kinds = shapes.setdefault(wish.key, drawn) if wish.key else drawn
    return replace(wish, then=then).with_choices(*(_choice(wish, kind, i) for i, kind in enumerate(kinds, 1)))


def _choice(wish: Wish, kind: int, number: int) -> tuple[tuple[int, ...], SamplingParams]:
    """Mostly another answer to the same prompt; else one to another prompt, which is no longer."""
    prompt = wish.prompt if kind else (number, *wish.prompt[1:])
    return prompt, wish.sampling.model_copy(update={"seed": wish.sampling.seed + number})
