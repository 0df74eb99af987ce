"""Celery's broker: doorbells on the queues of the roles and on the direct queue of each node.

A node that wants a bell listens; the broker gives it one and forgets it, whatever becomes of the node.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from app.protocol.commands import Bell
from tests.sim.process import Process, State

if TYPE_CHECKING:
    from tests.sim.node import KVNode
    from tests.sim.world import World


class Broker(Process):
    """Frozen together with the ledger where both are one server."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "broker")
        self._queues: dict[str, deque[Bell]] = {}
        self._listening: dict[str, KVNode] = {}
        self.only: frozenset[str] | None = None
        """Names of the nodes that get bells; None: all."""

    def ring(self, process: Process, bell: Bell) -> None:
        """Somebody rings on a role's queue, or (without a uid) at its own."""
        world = self.world
        queue = bell.queue if bell.uid else process.name
        world.note(process.name, "rings", bell.uid, bell)
        for delay in world.faults.bell(bell):
            world.timeline.at(world.timeline.now + world.pace.network() + delay, partial(self.put, queue, bell))

    def put(self, queue: str, bell: Bell) -> None:
        """A bell arrives in its queue."""
        self._queues.setdefault(queue, deque()).append(bell)
        self._give(queue)

    def listens(self, node: KVNode) -> None:
        """``node`` takes one bell, now or whenever there is one."""
        if self._listening.get(node.name) is not node:
            self._listening[node.name] = node
            self._give(node.name)
            self._give(node.role)

    def open_up(self, only: frozenset[str] | None) -> None:
        """Give bells to these nodes only, or again to all."""
        self.only = only
        for queue in list(self._queues):
            self._give(queue)

    def lose_all(self) -> None:
        """It restarts, and kept nothing."""
        self._queues.clear()

    def thaw(self) -> None:
        super().thaw()
        self.open_up(self.only)

    def _give(self, queue: str) -> None:
        waiting = self._queues.get(queue)
        while waiting and self.state is State.RUNNING:
            ready = [
                node
                for name, node in self._listening.items()
                if queue in (name, node.role) and node.alive and (self.only is None or name in self.only)
            ]
            if not ready:
                return
            node = ready[self.world.pace.choose(len(ready))] if len(ready) > 1 else ready[0]
            del self._listening[node.name]
            bell = waiting.popleft()
            node.after(self.world.pace.network(), node.hears, bell)
            self.world.faults.popped(node)
