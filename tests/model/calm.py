"""The faults are over: what is dead starts, what is frozen goes on, and everything must come to rest in its time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.model.wishes import Order
from tests.sim.process import State
from tests.sim.run import not_at_rest

if TYPE_CHECKING:
    from tests.model.cluster import Cluster
    from tests.model.mishaps import Mishaps

_LOOK_EVERY_S = 0.25
_CANARY_S = 5.0


def repair(cluster: Cluster, mishaps: Mishaps) -> None:
    """End every fault that lasts. A job that is stuck stays so: the watchdog ends its process."""
    world = cluster.world
    cluster.faults.clear()
    cluster.supervisor.silent_about.clear()
    cluster.supervisor.restarts = True
    for node in world.nodes():
        for part in (node.engine, node.mover):
            part.stuck = part.stuck and part.entered_at is not None
    while mishaps.mender:
        mishaps.mender.mend(0)
    for name in cluster.names(State.DEAD):
        mishaps.restart(name)
    world.note("", "no more faults", "")


def come_to_rest(cluster: Cluster) -> float:
    """Go on until all is answered and free; a violation if that takes longer than it may. Answers how long it took."""
    world = cluster.world
    began = world.timeline.now
    bound_s = world.times.baseline_s + replace(world.scenario, wishes=tuple(cluster.wishes)).service_s
    while missing := not_at_rest(world):
        if world.timeline.now - began >= bound_s:
            raise world.violation(f"not at rest {bound_s:.1f} s after the last fault: {missing}")
        cluster.run_for(_LOOK_EVERY_S)
    return world.timeline.now - began


def send_canary(cluster: Cluster) -> None:
    """The next request works, with nobody touching anything, at the first try."""
    world = cluster.world
    began = world.timeline.now
    stream = cluster.submit(Order(prompt_tokens=6, max_tokens=4, ignore_eos=True, max_attempts=1), 0, "canary")
    while not stream.outcome or not_at_rest(world):
        if world.timeline.now - began >= _CANARY_S:
            raise world.violation(f"the canary is not done: {stream.outcome} {not_at_rest(world)}", stream.uid)
        cluster.run_for(_LOOK_EVERY_S / 5)
    if stream.outcome != "finished":
        raise world.violation(f"the canary ends with {stream.outcome}", stream.uid)
