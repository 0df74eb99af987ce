"""A state while something happens in it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from app.protocol import effects as do
from app.protocol.commands import Bell, Command
from app.protocol.messages import Reply
from tests.search.configuration import CALL_TTL_MS, Configuration
from tests.search.ledger_steps import LedgerSteps
from tests.search.merging import Merging
from tests.search.process_steps import NOBODY, Fresh, Happening, ProcessSteps
from tests.search.state import (
    BELL,
    MESSAGE,
    REPLY,
    WANTS_REGISTRATION,
    Item,
    Numbering,
    Slot,
    State,
    Wishes,
    names_of_net,
    names_of_slot,
)
from tests.search.values import NAMES, VALUES, generation_name

PREFILL_QUEUE, DECODE_QUEUE, DIRECT_QUEUES = range(3)
"""Numbers of the queues for bells; the direct queue of a process is the last one plus its place."""


class Cluster:
    """What does not change from state to state."""

    def __init__(self, configuration: Configuration, merges: bool = True) -> None:
        self.configuration = configuration
        self.nodes = configuration.nodes
        self.processes = ProcessSteps(configuration)
        self.ledger = LedgerSteps(configuration)
        self.slots: Numbering[Slot] = Numbering(self._names_of_slot)
        self.nets: Numbering[tuple[Item, ...]] = Numbering(names_of_net)
        self.wishes: Numbering[Wishes] = Numbering()
        self.merging = Merging(self, merges)
        self._incarnations: dict[tuple[int, int], int] = {}
        self._place = {name: place for place, name in enumerate(self.nodes)}
        self.places_of_role = {
            role: tuple([place for place, name in enumerate(self.nodes) if name[0] == role[0]])
            for role in ("prefill", "decode")
        }

    def _names_of_slot(self, slot: Slot) -> frozenset[str]:
        return names_of_slot(slot) | self.processes.facts[slot.process].names

    def incarnation(self, place: int, life: int) -> int:
        """Value of the incarnation of a process."""
        number = self._incarnations.get((place, life))
        if number is None:
            number = self._incarnations[place, life] = VALUES.number(f"{self.nodes[place]}.{life}")
        return number

    def place_of(self, name: str) -> int:
        """Where a state lists the node ``name``."""
        return self._place[name]


class Draft:
    """A copy to change; ``state`` is what has become of it."""

    def __init__(self, cluster: Cluster, state: State) -> None:
        self.cluster = cluster
        self.ledger = state.ledger
        self.saved = state.saved
        self.net = cluster.nets.things[state.net]
        self.wishes = cluster.wishes.things[state.wishes]
        self.slots = [cluster.slots.things[number] for number in state.slots]
        self.by_itself = True
        """Nothing was drawn, nobody called or acknowledged: no more was looked at than what a move changes."""
        self.rung: list[Item] = []
        """Bells, those that waited already too."""
        self._was = state

    def state(self) -> State:
        """What has become of it, without what nobody can ask for any more."""
        cluster, was = self.cluster, self._was
        net, slots = was.net, was.slots
        if self.net is not cluster.nets.things[net]:
            net = cluster.nets.number(tuple(sorted(self.net)))
        things = cluster.slots.things
        if any(slot is not things[number] for slot, number in zip(self.slots, slots, strict=True)):
            slots = tuple([cluster.slots.number(slot) for slot in self.slots])
        return cluster.merging.merged(State(self.ledger, self.saved, net, cluster.wishes.number(self.wishes), slots))

    def send(self, item: Item) -> None:
        """Something gets on its way."""
        self.net = (*self.net, item)

    def take(self, which: int) -> Item:
        """Something is not on its way any more."""
        self.net, item = self.net[:which] + self.net[which + 1 :], self.net[which]
        return item

    # processes

    def incarnation(self, place: int) -> int:
        """Value of the present incarnation at a place."""
        return self.cluster.incarnation(place, self.slots[place].life)

    def hear(self, place: int, happening: Happening, a: int = 0, b: int = 0) -> None:
        """Something happens to a process; what it wants gets on its way."""
        slot = self.slots[place]
        step = self.cluster.processes.step(slot.process, happening, a, b, lambda: self.fresh(place))
        self.by_itself = self.by_itself and not step.drew
        if step.tags is not None:
            tags = step.tags
            slot = slot._replace(
                process=step.process,
                calls=tuple([(tags.get(tag, NOBODY), command, left) for tag, command, left in slot.calls]),
                answers=tuple([(tags[tag], answer) for tag, answer in slot.answers]),
                open=tuple([(number, tags[tag], left, peer) for number, tag, left, peer in slot.open]),
            )
        else:
            slot = slot._replace(process=step.process)
        self.slots[place] = slot
        for wanted in step.wants:
            self._want(place, wanted)

    def _want(self, place: int, wanted: object) -> None:
        slot = self.slots[place]
        match wanted:
            case do.Ask(tag, command):
                self.slots[place] = slot._replace(calls=(*slot.calls, (tag, VALUES.number(command), CALL_TTL_MS)))
            case do.Call():
                self._call(place, wanted)
            case do.ReplyTo(call_id, reply):
                self.reply(int(call_id.removeprefix("call-")), reply)
            case do.Ring(bell):
                self.ring(place, bell)
            case do.Register():
                self.slots[place] = slot._replace(beats=WANTS_REGISTRATION)

    def _call(self, place: int, call: do.Call) -> None:
        self.by_itself = False
        number = self._fresh_call()
        slot = self.slots[place]
        peer = VALUES.number(call.incarnation)
        if call.tag != NOBODY:
            opened = (number, call.tag, round(1000 * call.timeout_s), peer)
            self.slots[place] = slot._replace(open=tuple(sorted((*slot.open, opened))))
        receiver = self.cluster.place_of(call.address)
        self.send((MESSAGE, number, receiver, peer, VALUES.number(call.message), 0))

    def reply(self, number: int, reply: Reply) -> None:
        """Acknowledge a call; nothing if its caller does not wait any more."""
        self.by_itself = False
        for place, slot in enumerate(self.slots):
            if any(opened[0] == number for opened in slot.open):
                self.send((REPLY, number, place, VALUES.number(reply), 0))

    def ring(self, place: int, bell: Bell) -> None:
        """A bell gets into its queue; where the same one waits already, a second one says nothing new. Nor does the
        number of an attempt: nobody reads it."""
        queue = DIRECT_QUEUES + place
        if bell.uid:
            queue = PREFILL_QUEUE if bell.queue == "prefill" else DECODE_QUEUE
        item = (BELL, queue, VALUES.number(replace(bell, attempt=0)), 0)
        self.rung.append(item)
        if item not in self.net:
            self.send(item)

    # the ledger

    def apply(self, command: int, late: bool) -> int:
        """Apply a command; answers the value of its answer."""
        applied = self.cluster.ledger.apply(self.ledger, command, late)
        self.ledger = applied.ledger
        for bell in applied.bells:
            self.ring(-1, bell)
        return applied.answer

    def execute(self, command: Command) -> object:
        """Apply a command that is given as itself, and in time."""
        return VALUES[self.apply(VALUES.number(command), False)]

    # names

    def fresh(self, place: int) -> Fresh:
        """What a process may draw now."""
        used = self._names_in_use()
        name, incarnation = self.cluster.nodes[place], VALUES[self.incarnation(place)]
        return Fresh(
            next(fresh for number in count(1) if not NAMES.bit(fresh := f"{name}-{number}") & used),
            next(number for number in count(1) if not NAMES.bit(generation_name(incarnation, number)) & used),
        )

    def _fresh_call(self) -> int:
        used = self._names_in_use()
        return next(number for number in count(1) if not NAMES.bit(f"call-{number}") & used)

    def fresh_life(self, place: int) -> int:
        """Number for a new incarnation."""
        used, name = self._names_in_use(), self.cluster.nodes[place]
        return next(number for number in count(1) if not NAMES.bit(f"{name}.{number}") & used)

    def _names_in_use(self) -> int:
        cluster, facts = self.cluster, self.cluster.ledger.facts
        used = facts[self.ledger].mask | NAMES.mask(names_of_net(self.net))
        if self.saved >= 0:
            used |= facts[self.saved].mask
        for slot in self.slots:
            used |= cluster.slots.masks[cluster.slots.number(slot)]
        return used
