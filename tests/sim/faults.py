"""What may go wrong, and the policy that decides at each moment whether it does.

Swarm style: every seed enables a random subset of the kinds, each with a rate of its own, so that some runs are calm,
some see one kind alone and often, and some see everything at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from app.protocol.commands import Bell, Command
from app.protocol.messages import Message
from app.protocol.tables import BlockState
from tests.sim.fates import FINE, ON_TIME, CallFate, Delays
from tests.sim.mangle import mangle

if TYPE_CHECKING:
    from tests.sim.kv_memory import KVMemory
    from tests.sim.node import KVNode
    from tests.sim.world import World


class Fault(StrEnum):
    """What is decided anew for each call, message, bell, event, block, or step."""

    LEDGER_CALL_LOST = "ledger call lost"
    LEDGER_REPLY_LOST = "ledger reply lost"
    LEDGER_CALL_LATE = "ledger call applied late"
    LEDGER_REPLY_CUT_SHORT = "ledger replies cut short"
    MESSAGE_LOST = "message lost"
    MESSAGE_DOUBLED = "message doubled"
    MESSAGE_LATE = "message late"
    REPLY_LOST = "reply lost"
    REPLY_LATE = "reply late"
    MESSAGE_MANGLED = "message mangled"
    BELL_LOST = "bell lost"
    BELL_DOUBLED = "bell doubled"
    BELL_LATE = "bell late"
    BELL_POPPED_BY_THE_DYING = "bell popped by a node that dies"
    EVENT_LOST = "event lost"
    EVENT_DOUBLED = "event doubled"
    EVENT_LATE = "event late"
    BEAT_LOST = "beat lost"
    BEAT_DOUBLED = "beat doubled"
    KV_CORRUPTED = "KV corrupted"
    SEQUENCE_BROKEN = "engine error for one sequence"
    TOKEN_TIED = "tie of two tokens"
    POISON_PROMPT = "poison prompt"


MOST: Mapping[Fault, float] = {
    Fault.LEDGER_CALL_LOST: 0.1,
    Fault.LEDGER_REPLY_LOST: 0.1,
    Fault.LEDGER_CALL_LATE: 0.1,
    Fault.LEDGER_REPLY_CUT_SHORT: 0.6,
    Fault.MESSAGE_LOST: 0.5,
    Fault.MESSAGE_DOUBLED: 0.8,
    Fault.MESSAGE_LATE: 0.5,
    Fault.REPLY_LOST: 0.5,
    Fault.REPLY_LATE: 0.5,
    Fault.MESSAGE_MANGLED: 0.5,
    Fault.BELL_LOST: 0.6,
    Fault.BELL_DOUBLED: 0.6,
    Fault.BELL_LATE: 0.5,
    Fault.BELL_POPPED_BY_THE_DYING: 0.05,
    Fault.EVENT_LOST: 0.5,
    Fault.EVENT_DOUBLED: 0.5,
    Fault.EVENT_LATE: 0.5,
    Fault.BEAT_LOST: 0.9,
    Fault.BEAT_DOUBLED: 0.9,
    Fault.KV_CORRUPTED: 0.3,
    Fault.SEQUENCE_BROKEN: 0.02,
    Fault.TOKEN_TIED: 0.5,
    Fault.POISON_PROMPT: 1.0,
}
"""The highest rate of each kind."""


class Faults:
    """The policy. ``rates`` holds the enabled kinds only; once ``active`` is false nothing goes wrong any more."""

    def __init__(self, world: World, seed: object, rates: Mapping[Fault, float]) -> None:
        self.active = True
        self.rates = dict(rates)
        self.poison: set[str] = set()
        """uids whose computation kills the node."""
        self._world = world
        self._rng = Random(f"{seed}/faults")

    # plain chance

    def coin(self) -> bool:
        return self._rng.random() < 0.5

    def within(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def pick(self, count: int) -> int:
        return self._rng.randrange(count)

    def _strikes(self, kind: Fault) -> bool:
        rate = self.rates.get(kind)
        if rate is None or self._rng.random() >= rate:
            return False
        self._world.count(kind)
        return True

    # what may happen to what is on its way

    def ledger_call(self, who: str, commands: Sequence[Command]) -> CallFate:
        """Fate of one round trip to the ledger."""
        if not self.active or not self.rates:
            return FINE
        breaks_s = None if self.coin() else self.within(0.0, 0.1)
        if self._strikes(Fault.LEDGER_CALL_LOST):
            return self._note(who, Fault.LEDGER_CALL_LOST, commands, CallFate(None, None, breaks_s))
        if self._strikes(Fault.LEDGER_REPLY_LOST):
            return self._note(who, Fault.LEDGER_REPLY_LOST, commands, CallFate(0.0, 0, breaks_s))
        if self._strikes(Fault.LEDGER_CALL_LATE):
            late = CallFate(self.within(0.05, 8.0), 0, breaks_s)
            return self._note(who, Fault.LEDGER_CALL_LATE, commands, late)
        if len(commands) > 1 and self._strikes(Fault.LEDGER_REPLY_CUT_SHORT):
            cut = CallFate(0.0, self.pick(len(commands)), breaks_s)
            return self._note(who, Fault.LEDGER_REPLY_CUT_SHORT, commands, cut)
        return FINE

    def _note(self, who: str, kind: Fault, commands: Sequence[Command], fate: CallFate) -> CallFate:
        for command in commands:
            self._world.note(who, "fault", getattr(command, "uid", ""), kind, command)
        return fate

    def message(self, message: Message) -> Delays:
        """Fate of a message between nodes."""
        kinds = (Fault.MESSAGE_LOST, Fault.MESSAGE_DOUBLED, Fault.MESSAGE_LATE)
        return self._carried(*kinds, 4.0, message.uid) if self.active else ON_TIME

    def mangled(self, message: Message) -> Message | None:
        """What is read at the other end: another name in it, too few blocks, another kind; None: no message at all."""
        if not (self.active and self._strikes(Fault.MESSAGE_MANGLED)):
            return message
        self._world.note("", "fault", message.uid, Fault.MESSAGE_MANGLED)
        return mangle(message, self._rng)

    def reply(self) -> Delays:
        """Fate of its acknowledgement."""
        return self._carried(Fault.REPLY_LOST, None, Fault.REPLY_LATE, 4.0, "") if self.active else ON_TIME

    def bell(self, bell: Bell) -> Delays:
        """Fate of a doorbell."""
        kinds = (Fault.BELL_LOST, Fault.BELL_DOUBLED, Fault.BELL_LATE)
        return self._carried(*kinds, 5.0, bell.uid) if self.active else ON_TIME

    def event(self, uid: str) -> Delays:
        """Fate of an event on a web's stream."""
        kinds = (Fault.EVENT_LOST, Fault.EVENT_DOUBLED, Fault.EVENT_LATE)
        return self._carried(*kinds, 2.0, uid) if self.active else ON_TIME

    def beat(self) -> Delays:
        """Fate of a tick of beat."""
        return self._carried(Fault.BEAT_LOST, Fault.BEAT_DOUBLED, None, 1.0, "") if self.active else ON_TIME

    def _carried(self, lost: Fault, doubled: Fault | None, late: Fault | None, most_s: float, uid: str) -> Delays:
        if self._strikes(lost):
            self._world.note("", "fault", uid, lost)
            return ()
        if doubled is not None and self._strikes(doubled):
            self._world.note("", "fault", uid, doubled)
            return (0.0, self._rng.choice((0.0, 0.01, self.within(0.0, most_s))))
        if late is not None and self._strikes(late):
            self._world.note("", "fault", uid, late)
            return (self._rng.choice((0.005, 0.05, self.within(0.0, most_s))),)
        return ON_TIME

    # what may happen inside a node

    def popped(self, node: KVNode) -> None:
        """``node`` has just been given a bell."""
        if self.active and self._strikes(Fault.BELL_POPPED_BY_THE_DYING):
            node.after(0.0, node.crash, "fault: right after it popped a bell")

    def copied(self, incarnation: str, memory: KVMemory, block: int) -> None:
        """A block has been copied from a peer into ``memory``."""
        if self.active and self._strikes(Fault.KV_CORRUPTED):
            self._world.note(incarnation, "fault", "", Fault.KV_CORRUPTED, block)
            memory.blocks[block][self.pick(len(memory.blocks[block]))] ^= 1 << self.pick(60)

    def rots(self, node: KVNode) -> None:
        """Bytes of a block, or of all, that ``node`` has cached, and that nobody holds, may go bad now."""
        if not (self.active and self._strikes(Fault.KV_CORRUPTED)):
            return
        pool, memory = node.machine.pool, node.memory
        cached = [block for block in range(pool.num_blocks) if pool.owner_of(block)[1] is BlockState.CACHED]
        if cached and self.coin():
            cached = [cached[self.pick(len(cached))]]
        for block in cached:
            self._world.note(node.name, "fault", "", Fault.KV_CORRUPTED, block)
            self._world.count("cached block corrupted")
            memory.blocks[block][self.pick(len(memory.blocks[block]))] ^= 1 << self.pick(60)

    def breaks_sequence(self, node: str, uid: str) -> bool:
        """Whether the engine cannot compute this sequence now."""
        if not (self.active and self._strikes(Fault.SEQUENCE_BROKEN)):
            return False
        self._world.note(node, "fault", uid, Fault.SEQUENCE_BROKEN)
        return True

    def ties(self, node: str, uid: str) -> bool:
        """Whether this draw falls on the other one of two tokens."""
        if not (self.active and self._strikes(Fault.TOKEN_TIED)):
            return False
        self._world.note(node, "fault", uid, Fault.TOKEN_TIED)
        return True

    def kills_its_node(self, uid: str) -> bool:
        """Whether a step that computes this sequence ends its process."""
        if uid not in self.poison or not self.active:
            return False
        self._world.count(Fault.POISON_PROMPT)
        return True
