"""Moves whose outcome depends on one process only, or on one process and the ledger: worked out once each.

Most moves are of this kind: they draw no name, call nobody and acknowledge nothing. What they change is then the same
wherever that process (and the ledger) are in that situation.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.search.draft import Cluster, Draft
from tests.search.moves import Move, do_move
from tests.search.state import Item, State

_BY_PROCESS = frozenset({"answer", "engine", "poll"})
_Key = tuple[str, int, int, int]


class Outcome(NamedTuple):
    """What becomes of the ledger and the process, and which bells ring."""

    ledger: int
    slot: int
    rung: tuple[Item, ...]


class Shortcuts:
    """Does moves, and remembers what comes of those that can be remembered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[_Key, Outcome | None] = {}
        self._nets: dict[tuple[int, tuple[Item, ...]], int] = {}

    def after(self, state: State, move: Move) -> State:
        """The state after a due or free move."""
        kind, at, _ = move
        if kind == "apply":
            key = (kind, at, state.slots[at], state.ledger)
        elif kind in _BY_PROCESS:
            key = (kind, at, state.slots[at], -1)
        else:
            return self._done(state, move).state()
        if key not in self._known:
            return self._remembered(state, move, key)
        outcome = self._known[key]
        if outcome is None:
            return self._done(state, move).state()
        ledger, slot, rung = outcome
        slots = list(state.slots)
        slots[at] = slot
        if kind != "apply":
            ledger = state.ledger
        net = self._with(state.net, rung) if rung else state.net
        return self._cluster.merging.merged(State(ledger, state.saved, net, state.wishes, tuple(slots)))

    def _done(self, state: State, move: Move) -> Draft:
        draft = Draft(self._cluster, state)
        do_move(draft, move)
        return draft

    def _remembered(self, state: State, move: Move, key: _Key) -> State:
        draft = self._done(state, move)
        slot = self._cluster.slots.number(draft.slots[move.at])
        self._known[key] = Outcome(draft.ledger, slot, tuple(draft.rung)) if draft.by_itself else None
        return draft.state()

    def _with(self, net: int, rung: tuple[Item, ...]) -> int:
        """What is on its way, and these bells."""
        key = (net, rung)
        number = self._nets.get(key)
        if number is None:
            items = self._cluster.nets.things[net]
            new = [item for item in rung if item not in items]
            number = self._nets[key] = self._cluster.nets.number(tuple(sorted([*items, *new])))
        return number
