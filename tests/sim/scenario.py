"""Everything about a run that is drawn before it begins: the cluster, the clients' wishes, what may go wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from app.protocol.commands import Limits
from app.schemas import SamplingParams
from tests.sim.client import Wish
from tests.sim.disasters import Disaster
from tests.sim.faults import MOST, Fault
from tests.sim.model import BLOCK_TOKENS
from tests.sim.pace import Slowness
from tests.sim.times import MOST_BLOCKS, Times

FAULTS_END_S = 8.0
_WISHES_FROM_S, _WISHES_TO_S = 0.3, 7.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a node."""

    num_blocks: int = 16
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    emit_buffer_tokens: int = 6


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed's draw."""

    seed: int
    nodes: Mapping[str, Shape]
    """Prefill nodes "p0", "p1", …, decode nodes "d0", …"""
    webs: int
    wishes: tuple[Wish, ...]
    poison: frozenset[str]
    """Client ids whose computation kills the node."""
    rates: Mapping[Fault, float]
    disasters: tuple[tuple[float, Disaster], ...]
    times: Times
    slowness: Slowness
    ledger_lanes: int
    """Connections on which a node asks the ledger at once: with several, answers come in any order."""
    one_host: bool
    """Whether deadlines in messages can be compared with the receiver's clock."""
    one_server: bool
    """Whether ledger and broker are one server."""
    exits_reported: float

    @property
    def service_s(self) -> float:
        """Time that all wishes together take at most, one after the other on the slowest nodes, computed twice."""
        sequences = [choice for wish in self.wishes for choice in wish.choices]
        steps = sum(len(each.prompt) / BLOCK_TOKENS + each.sampling.max_tokens for each in sequences)
        blocks = sum((len(each.prompt) + each.sampling.max_tokens) / BLOCK_TOKENS for each in sequences)
        return 2 * (0.012 * self.slowness.steps * steps + 0.0012 * self.slowness.blocks * blocks) + 2.0


Kind = Fault | Disaster


def draw_scenario(seed: int, only: Sequence[Kind] | None = None) -> Scenario:
    """The scenario of ``seed``; with ``only`` these kinds of trouble, and plenty of them."""
    rng = Random(f"{seed}/scenario")
    times = Times(
        first_token_timeout_s=rng.choice((300.0, 300.0, 300.0, 4.0)),
        queue_timeout_s=rng.choice((300.0, 300.0, 300.0, 3.0)),
        check_s=rng.choice((1.0, 1.0, 1.0, 1.0, 0.1)),
        grant_timeout_s=rng.choice((4.0, 4.0, 0.3)),
    )
    shape = Shape(
        num_blocks=rng.choice((8, 12, 16, MOST_BLOCKS)),
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_num_batched_tokens=rng.choice((8, 16, 64)),
        emit_buffer_tokens=rng.choice((2, 6, 20)),
    )
    names = [f"p{n}" for n in range(rng.choice((1, 1, 2, 2, 3)))] + [
        f"d{n}" for n in range(rng.choice((1, 1, 2, 2, 3)))
    ]
    webs = rng.choice((1, 1, 2))
    slowness = Slowness(
        network=rng.choice((1.0, 1.0, 5.0, 40.0)),
        steps=rng.choice((1.0, 3.0, 10.0, 30.0)),
        blocks=rng.choice((1.0, 10.0, 100.0, 250.0)),
    )
    wishes = _draw_wishes(rng, webs, shape, times)
    kinds = _draw_kinds(rng) if only is None else only
    rates = {
        kind: MOST[kind] * rng.random() ** (2 if only is None else 0.5) for kind in kinds if isinstance(kind, Fault)
    }
    disasters = _draw_disasters(rng, kinds, [wish.at_s for wish in wishes], 0.2 * slowness.steps)
    poisoned = frozenset({rng.choice(wishes).client_id}) if Fault.POISON_PROMPT in rates else frozenset()
    return Scenario(
        seed=seed,
        nodes=dict.fromkeys(names, shape),
        webs=webs,
        wishes=wishes,
        poison=poisoned,
        rates=rates,
        disasters=disasters,
        times=times,
        slowness=slowness,
        ledger_lanes=rng.choice((1, 1, 3)),
        one_host=rng.random() < 0.7,
        one_server=rng.random() < 0.7,
        exits_reported=rng.choice((1.0, 1.0, 0.5, 0.0)),
    )


def _draw_kinds(rng: Random) -> list[Kind]:
    """Nothing at all, one or two kinds alone, or a random share of all kinds."""
    kinds: list[Kind] = [*Fault, *Disaster]
    style = rng.random()
    if style < 0.05:
        return []
    if style < 0.35:
        return rng.sample(kinds, rng.choice((1, 2)))
    share = rng.choice((0.1, 0.2, 0.4))
    return [kind for kind in kinds if rng.random() < share]


def _draw_disasters(
    rng: Random, kinds: Sequence[Kind], moments: list[float], busy_s: float
) -> tuple[tuple[float, Disaster], ...]:
    """Every other one strikes within ``busy_s`` of one of these ``moments``, in the middle of some work."""
    plan = [
        (rng.choice((rng.uniform(0.2, FAULTS_END_S - 0.5), rng.choice(moments) + busy_s * rng.random())), kind)
        for kind in kinds
        if isinstance(kind, Disaster)
        for _ in range(rng.choice((1, 1, 2, 4)))
    ]
    return tuple(sorted(plan))


def _draw_wishes(rng: Random, webs: int, shape: Shape, times: Times) -> tuple[Wish, ...]:
    """Requests in bursts; some leave, cancel, come twice, or come again with another prompt under the same id."""
    shared = tuple(rng.randrange(1, 1000) for _ in range(4 * BLOCK_TOKENS))
    wishes: list[Wish] = []
    moment = rng.uniform(_WISHES_FROM_S, _WISHES_TO_S)
    for number in range(rng.choice((3, 6, 10, 14))):
        if rng.random() < 0.5:
            moment = rng.uniform(_WISHES_FROM_S, _WISHES_TO_S)
        wish = _draw_wish(rng, f"r{number}", moment, webs, shape, times, shared)
        wishes.append(wish)
        if rng.random() < 0.15:  # the same id once more, probably while it is in process
            twin = _draw_wish(rng, wish.client_id, moment + rng.choice((0.0, 0.002, 0.1)), webs, shape, times, shared)
            wishes.append(replace(twin, then=None))
        if wish.key:
            wishes += _draw_attachments(rng, wish, webs, shape)
    return tuple(wishes)


def _draw_attachments(rng: Random, wish: Wish, webs: int, shape: Shape) -> list[Wish]:
    """The same request once more under its key, as of a client that lost its connection; sometimes another body."""
    again = []
    for number in range(rng.choice((0, 1, 1, 2))):
        prompt = (*wish.prompt, 1) if rng.random() < 0.1 else wish.prompt
        if len(prompt) + wish.sampling.max_tokens > shape.num_blocks * BLOCK_TOKENS:
            prompt = wish.prompt  # admitted while no node lived, it would wait for its first token for minutes
        again.append(
            replace(
                wish,
                at_s=wish.at_s + rng.choice((0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 4.0))),
                web=f"w{rng.randrange(webs)}",
                client_id=f"{wish.client_id}-again{number}",
                leaves_after_s=_some_time(rng, 0.2),
                cancels_after_s=None,
                then=None,
                prompt=prompt,
            )
        )
    return again


def _draw_wish(
    rng: Random, client_id: str, moment: float, webs: int, shape: Shape, times: Times, shared: tuple[int, ...]
) -> Wish:
    most = shape.num_blocks * BLOCK_TOKENS
    max_tokens = rng.choice((1, 2, rng.randrange(1, 21), rng.randrange(1, 21), rng.randrange(1, 61)))
    length = rng.choice((1, 4, 5, rng.randrange(1, 24), most + 1 if rng.random() < 0.1 else 8))
    if length <= most:
        length = max(1, min(length, most - max_tokens))
        max_tokens = min(max_tokens, most - length) or 1
    prompt = tuple(rng.randrange(1, 1000) for _ in range(length))
    if rng.random() < 0.6:
        prompt = (shared[: rng.choice((2, 2, 3, 4)) * BLOCK_TOKENS] + prompt)[:length]
    keyed = rng.random() < 0.25
    wish = Wish(
        at_s=moment,
        web=f"w{rng.randrange(webs)}",
        client_id=client_id,
        prompt=prompt,
        sampling=SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=(seed := rng.randrange(1000)),
            max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.2,
            logprobs=2 if seed % 3 == 0 else None,
        ),
        limits=Limits(
            max_attempts=rng.choice((1, 2, 3, 3, 3)),
            max_queued=rng.choice((100, 100, 100, 3)),
            # Admitted while no node lived, it can only expire.
            queue_timeout_ms=round(1000 * (times.queue_timeout_s if length <= most else 3.0)),
            first_token_timeout_ms=round(1000 * times.first_token_timeout_s),
            record_ttl_ms=86_400_000,
            grace_ms=round(1000 * times.idempotency_grace_s) if keyed else 0,
            dedup_window_ms=rng.choice((0, 0, 0, 2000)),
        ),
        key=f"key-{client_id}" if keyed else "",
        leaves_after_s=_some_time(rng, 0.3 if keyed else 0.1),
        cancels_after_s=_some_time(rng, 0.15),
        salt=rng.choice(("", "", "", "tenant")),
        cancels_at=f"w{rng.randrange(webs)}",
    )
    if rng.random() < 0.2:
        again = _draw_wish(rng, client_id, moment, webs, shape, times, shared)
        wish = replace(wish, then=replace(again, then=None, key=f"{again.key}-then" if again.key else ""))
    return wish


def _some_time(rng: Random, chance: float) -> float | None:
    if rng.random() >= chance:
        return None
    return rng.choice((rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.4), rng.uniform(0.0, 4.0)))
