"""Storms of cancellations over a simulated cluster: all blocks come back, and the next requests are as any."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from app.protocol import effects as do
from app.protocol.commands import Limits
from app.schemas import SamplingParams
from tests.sim.client import Wish
from tests.sim.faults import Fault
from tests.sim.node import KVNode
from tests.sim.pace import Slowness
from tests.sim.run import not_at_rest, run_scenario
from tests.sim.scenario import Scenario, Shape, draw_scenario
from tests.sim.times import Times
from tests.sim.web import Web
from tests.sim.world import World


def test_four_times_three_hundred_cancellations_in_the_middle_of_a_transfer() -> None:
    world = World(quiet_scenario())
    run_until(world, lambda: not not_at_rest(world), within_s=2.0)
    cancelled: list[str] = []
    for node in world.nodes():
        if node.role == "decode":
            cancel_as_soon_as_it_is_pulled(world, node, "long", cancelled)
    for number in range(4):
        doomed = [_wish(f"long-{number}-{n}", (number, n, *range(1, 20)), world) for n in range(300)]
        streams = [world.clients.add(wish) for wish in doomed]
        run_until(world, lambda: world.clients.all_answered)
        assert {stream.outcome for stream in streams} == {"request_cancelled"}
        run_until(world, lambda: not not_at_rest(world), within_s=3.0)
        normal = [_wish(f"next-{number}-{n}", (number, n, 9), world) for n in range(10)]
        streams = [world.clients.add(wish) for wish in normal]
        run_until(world, lambda: world.clients.all_answered, within_s=10.0)
        records = [world.ledger.store.records[stream.uid] for stream in streams]
        assert [(record.state, record.failures) for record in records] == [("FINISHED", 0)] * 10
    assert len(cancelled) == 4 * 300


def cancel_as_soon_as_it_is_pulled(world: World, node: KVNode, whose: str, cancelled: list[str]) -> None:
    """The client cancels when the transfer of its KV to ``node`` begins."""
    web, begin = world.current("w0"), node._perform[do.Pull]
    assert isinstance(web, Web)

    def pull(job: do.Pull) -> None:
        begin(job)
        client_id = node.machine.table[job.key].client_id
        if client_id.startswith(whose):
            cancelled.append(client_id)
            web.cancel(client_id)

    node._perform[do.Pull] = pull


def test_a_thousand_cancellations_departures_and_timeouts_at_random_moments() -> None:
    rng = random.Random(11)
    lost = {Fault.MESSAGE_LOST: 0.05, Fault.REPLY_LOST: 0.05}
    wishes = tuple(_random_wish(rng, number) for number in range(1000))
    result = run_scenario(replace(quiet_scenario(), wishes=wishes, rates=lost))
    assert result.violation == ""
    assert result.outcomes["request_cancelled"] > 500
    assert result.outcomes["left"] > 100
    assert result.outcomes["finished"] > 100
    assert result.counts["failed: grant_unacknowledged"] + result.counts["failed: commit_unacknowledged"] > 5


def _random_wish(rng: random.Random, number: int) -> Wish:
    """Two of three are cancelled, one of six leaves, the others want their answers; all in seven seconds."""
    wish = _wish(f"r{number}", tuple(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 20))))
    return replace(
        wish,
        at_s=0.5 + 0.0065 * number,
        cancels_after_s=rng.uniform(0, 0.3) if number % 3 else None,
        leaves_after_s=rng.uniform(0, 0.3) if number % 6 == 0 else None,
    )


def _wish(client_id: str, prompt: tuple[int, ...], world: World | None = None) -> Wish:
    return Wish(
        at_s=world.timeline.now if world else 0.0,
        web="w0",
        client_id=client_id,
        prompt=prompt,
        sampling=SamplingParams(temperature=0, seed=1, max_tokens=12, ignore_eos=True),
        limits=Limits(3, 10_000, 300_000, 300_000, 86_400_000),
        cancels_at="w0",
    )


def quiet_scenario() -> Scenario:
    """Two and two nodes, slow transfers, and nothing that goes wrong."""
    shape = Shape(num_blocks=64, max_num_seqs=16, max_num_batched_tokens=64)
    return replace(
        draw_scenario(1, []),
        nodes=dict.fromkeys(("p0", "p1", "d0", "d1"), shape),
        webs=1,
        wishes=(),
        slowness=Slowness(network=1.0, steps=1.0, blocks=50.0),
        times=Times(),
    )


def run_until(world: World, condition: Callable[[], bool], within_s: float = 120.0) -> None:
    """Let time pass until the condition holds; that must be so in time."""
    end = world.timeline.now + within_s
    happened = 0
    while happened % 20 or not condition():
        what = world.timeline.pop(end)
        assert what is not None, not_at_rest(world)
        world.happen(what)
        happened += 1
