"""A state of the whole: the ledger, the processes, what is on its way, and what may still go wrong.

All of it by number: a ``State`` is a few small integers. ``States`` knows what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from tests.search.values import NAMES, VALUES

Call = tuple[int, int, int]
"""A question to the ledger that was not applied yet: tag, value of the command, ms until its ``not_after``."""
Answer = tuple[int, int]
"""Tag, value of the answer; or -1: none will come."""
Open = tuple[int, int, int, int]
"""A call to a peer: number, tag, ms until its deadline, value of the peer's incarnation."""
Item = tuple[int, ...]
"""Something on its way between processes; what its numbers mean depends on the first of them (see ``Kind``)."""

STARTING, UNREGISTERED, WANTS_REGISTRATION, REGISTERED = range(4)
"""What a process's heartbeats are about. One that starts, or was refused, tries to register when time has passed."""


HANDED_BACK = 10**6
"""In place of a time: a draining process was asked to hand back what it holds."""


class Slot(NamedTuple):
    """One process, and what is on its way from and to it."""

    life: int
    """Number of its incarnation."""
    process: int
    calls: tuple[Call, ...] = ()
    """In the order in which they go out: one lane asks the ledger."""
    answers: tuple[Answer, ...] = ()
    """In the order in which they come in."""
    open: tuple[Open, ...] = ()
    beats: int = STARTING
    knows_life: bool = True
    """Whether its heartbeats have seen the ledger's present life."""
    frozen_ms: int = -1
    """For how long it has been frozen; -1: it runs."""
    drain_ms: int = -1
    """Until it hands back what it holds; -1: it does not drain; or ``HANDED_BACK``."""


MESSAGE, REPLY, BELL, CALL, EXIT = range(5)
"""Kinds of items: a message (call number, receiver, value of the incarnation it is for, value of the message);
a reply (call number, caller, value of the reply); a bell (queue, value of the bell); a ledger call whose caller does
not wait any more (value of the command, ms until its ``not_after``); an exit to be reported (value of the incarnation).
The last number of each: 1 if it may still come much later, and nobody waits for it."""


class Wishes(NamedTuple):
    """What may still be done to the cluster."""

    faults: int
    requests: int
    """How many of the requests have been sent."""
    aborts: int
    drains: int


class State(NamedTuple):
    """Numbers: of the ledger's situation, of its saved one (-1: not needed), of what is on its way, of the wishes, of
    each process."""

    ledger: int
    saved: int
    net: int
    wishes: int
    slots: tuple[int, ...]


T = TypeVar("T")


class Numbering(Generic[T]):
    """Numbers for hashable things of one kind, and the ids that each of them mentions."""

    def __init__(self, names_of: Callable[[T], frozenset[str]] = lambda thing: frozenset()) -> None:
        self.things: list[T] = []
        self.masks: list[int] = []
        """The names that each mentions."""
        self._numbers: dict[T, int] = {}
        self._names_of = names_of

    def number(self, thing: T) -> int:
        """The number of ``thing``."""
        number = self._numbers.get(thing)
        if number is None:
            number = self._numbers[thing] = len(self.things)
            self.things.append(thing)
            self.masks.append(NAMES.mask(self._names_of(thing)))
        return number


def names_of_net(net: tuple[Item, ...]) -> frozenset[str]:
    """The ids in what is on its way. Those of bells do not count: they are a hint."""
    names: frozenset[str] = frozenset()
    for item in net:
        if item[0] == MESSAGE:
            names |= VALUES.names(item[3]) | VALUES.names(item[4]) | {f"call-{item[1]}"}
        elif item[0] == REPLY:
            names |= {f"call-{item[1]}"}
        elif item[0] in (CALL, EXIT):
            names |= VALUES.names(item[1])
    return names


def names_of_slot(slot: Slot) -> frozenset[str]:
    """The ids in what is on its way from and to a process; without those of the process itself."""
    names: frozenset[str] = frozenset()
    for _, command, _ in slot.calls:
        names |= VALUES.names(command)
    for _, answer in slot.answers:
        if answer >= 0:
            names |= VALUES.names(answer)
    for opened in slot.open:
        names |= VALUES.names(opened[3]) | {f"call-{opened[0]}"}
    return names
