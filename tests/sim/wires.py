"""ZMQ between nodes, as ``app.link`` uses it: acknowledged calls with a deadline, addressed to an incarnation.

A message lives in the receiver's process until it is looked at: a frozen node reads it when it thaws, a dead one never.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.messages import Message, Refusal, Reply, refused
from tests.sim.process import Part, State

if TYPE_CHECKING:
    from tests.sim.node import KVNode
    from tests.sim.timeline import Happening
    from tests.sim.world import World

_NOTICES_A_CUT_S = 1.0
"""ZMQ's heartbeats tear a silent connection down after so long."""


class Wires:
    """Which connections are cut, and what waits on them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: dict[frozenset[str], int] = {}
        self._held: list[tuple[frozenset[str], Happening]] = []

    def cut(self, one: str, other: str) -> None:
        """Cut the link between two nodes, by name. Cuts add up."""
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def heal(self, one: str, other: str) -> None:
        """Undo one cut; what the kernel kept comes through now, however late."""
        pair = frozenset((one, other))
        left = self._cuts.pop(pair, 1) - 1
        if left > 0:
            self._cuts[pair] = left
            return
        held, self._held = self._held, []
        for where, what in held:
            if where == pair:
                self._world.timeline.at(self._world.timeline.now, what)
            else:
                self._held.append((where, what))

    def is_cut(self, one: str, other: str) -> bool:
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def send(self, sender: str, receiver: str, delays: tuple[float, ...], what: Happening) -> None:
        """Carry ``what`` to its process, once for each of ``delays``; a cut link keeps or drops it."""
        world = self._world
        for delay in delays:
            if not self.is_cut(sender, receiver):
                world.timeline.at(world.timeline.now + world.pace.network() + delay, what)
            elif world.faults.coin():
                self._held.append((frozenset((sender, receiver)), what))


class Link(Part):
    """One node's end of every link."""

    process: KVNode

    def __init__(self, node: KVNode) -> None:
        self.process = node
        self._number = 0
        self._open: dict[int, tuple[int, KVNode | None]] = {}
        self._answering: dict[str, tuple[KVNode, int]] = {}

    # calling

    def call(self, call: do.Call) -> None:
        """Send it; exactly one CallEnded comes of it, no later than its deadline."""
        node, world = self.process, self.process.world
        self._number += 1
        number = self._number
        peer = world.node_at(call.address)
        self._open[number] = (call.tag, peer)
        self.after(call.timeout_s, self._ended, number, "no acknowledgement in time")
        if peer is None:
            self.after(world.pace.network(), self._ended, number, "not sent: not reachable")
            return
        world.note(node.name, f"{call.message.kind} to {peer.name}", call.message.uid, call.message)
        deadline = world.timeline.now + call.timeout_s
        read = world.faults.mangled(call.message)
        arrives = partial(peer.link.arrives, node, number, call.incarnation, deadline, read)
        world.wires.send(node.name, peer.name, world.faults.message(call.message), arrives)
        if world.wires.is_cut(node.name, peer.name) and world.faults.coin():
            self.after(min(_NOTICES_A_CUT_S, call.timeout_s), self._ended, number, "connection lost")

    def replied(self, number: int, reply: Reply) -> None:
        """The acknowledgement of one of our calls; ignored when the call has ended."""
        if number in self._open:
            self.process.post(on.CallEnded(self._open.pop(number)[0], reply))

    def lost(self, peer: KVNode) -> None:
        """The connections to ``peer`` broke: calls that wait there end now."""
        for number in [number for number, (_, callee) in self._open.items() if callee is peer]:
            self._ended(number, "connection lost")

    def _ended(self, number: int, detail: str) -> None:
        if number in self._open:
            self.process.post(on.CallEnded(self._open.pop(number)[0], None, detail))

    # being called

    def arrives(self, sender: KVNode, number: int, to: str, deadline: float, message: Message | None) -> None:
        """A call comes in: refused here if it is for another life of this process, too late, or no message."""
        node, world = self.process, self.process.world
        refusal = Refusal.NONE
        if to != node.incarnation:
            refusal = Refusal.INCARNATION
        elif world.one_host and deadline < world.timeline.now:
            refusal = Refusal.EXPIRED
        elif message is None:
            refusal = Refusal.MALFORMED
        if refusal or message is None:
            world.refused(node.name, refused(refusal))
            self._reply(sender, number, refused(refusal))
            return
        call_id = f"{sender.incarnation}:{number}"
        self._answering[call_id] = (sender, number)
        node.post(on.Called(call_id, message))

    def reply(self, effect: do.ReplyTo) -> None:
        """Acknowledge a call; a second time for a doubled message."""
        waiting = self._answering.pop(effect.call_id, None)
        if waiting is not None:
            self._reply(*waiting, effect.reply)

    def _reply(self, sender: KVNode, number: int, reply: Reply) -> None:
        world = self.process.world
        if sender.state is not State.DEAD:
            answers = partial(sender.link.replied, number, reply)
            world.wires.send(self.process.name, sender.name, world.faults.reply(), answers)
