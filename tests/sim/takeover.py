"""Promise 2: what a dead process held is taken from it in time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.sim.blame import only_nodes
from tests.sim.shadow import Shadow

if TYPE_CHECKING:
    from tests.sim.world import World

_SEEN_S = 1.0
"""Where a supervisor saw the exit."""
_SLACK_S = 0.3
"""For the calls of a scan on a slow network."""


def still_held(world: World, shadows: Iterable[Shadow]) -> tuple[str, str] | None:
    """(What, uid) of something that a process has held for longer than its death may take to be noticed.

    Counted from when the ledger could have done it, and from the last sign of life that it heard, however late.
    """
    bound_s = world.times.decided_s
    if not world.ledger.works or world.timeline.now - world.ledger.healthy_since < bound_s:
        return None
    for shadow in shadows:
        for holder in shadow.holders:
            died_at = world.died_at(holder)
            silent_since = max(died_at or 0.0, world.checker.heard_at.get(holder, 0.0))
            if died_at is not None and world.timeline.now - silent_since > bound_s:
                return f"{holder}, dead since {died_at:.3f}, still holds it", shadow.uid
    return None


def taken_late(world: World, holders: Iterable[str]) -> str:
    """An attempt is taken from dead nodes now. Where nothing but nodes goes wrong: why that is too late, or nothing."""
    if not only_nodes(world.scenario):
        return ""
    for holder in holders:
        died_at = world.died_at(holder)
        if died_at is not None:
            seen = holder in world.supervisor.seen
            bound_s = _SEEN_S if seen else world.times.node_ttl_s + world.times.scan_s + _SLACK_S
            if world.timeline.now - died_at > bound_s:
                return f"{holder} died {world.timeline.now - died_at:.3f} s ago{' before our eyes' if seen else ''}"
    return ""
