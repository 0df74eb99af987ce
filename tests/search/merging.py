"""Which states are one: those that nobody can tell apart any more.

Three things are taken out of a state after each move: what the ledger keeps only for who still knows a name, KV that
was given back and that no peer can still want to read, and gaps between the numbers of names (see ``renaming``). What
may happen in a state does not change by it: a search that takes out nothing but the first is bisimilar to one that
takes out all three, as a test shows for small configurations (see ``bisimulation``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.search.renaming import Renaming, renaming
from tests.search.state import State
from tests.search.values import NAMES

if TYPE_CHECKING:
    from tests.search.draft import Cluster


class Merging:
    """Brings states into the form that all of their kind share."""

    def __init__(self, cluster: Cluster, merges: bool) -> None:
        self._cluster = cluster
        self._merges = merges
        self._renamings: dict[int, Renaming | None] = {}
        self._ledgers: dict[tuple[int, Renaming], int] = {}
        self._nets: dict[tuple[int, Renaming], int] = {}
        self._slots: dict[tuple[int, int, Renaming], int] = {}

    def merged(self, state: State) -> State:
        """The form of ``state``."""
        ledger, saved, net, wishes, slots = state
        masks = self._cluster.slots.masks
        outside = self._cluster.nets.masks[net]
        if self._merges:
            slots = self._without_stale_kv(slots, outside)
        for number in slots:
            outside |= masks[number]
        facts = self._cluster.ledger.facts
        garbage = facts[ledger].garbage
        if garbage:
            found = tuple([one for one, bit in garbage if not bit & outside])
            if found:
                ledger = self._cluster.ledger.drop(ledger, found)
        if self._merges:
            used = outside | facts[ledger].mask
            if saved >= 0:
                used |= facts[saved].mask
            if used not in self._renamings:
                self._renamings[used] = renaming(NAMES.names(used))
            by = self._renamings[used]
            if by is not None:
                return self._renamed(State(ledger, saved, net, wishes, slots), by)
        return State(ledger, saved, net, wishes, slots)

    def _without_stale_kv(self, slots: tuple[int, ...], outside: int) -> tuple[int, ...]:
        """Forget KV that nobody owns and no peer knows."""
        cluster, masks = self._cluster, self._cluster.slots.masks
        for at, number in enumerate(slots):
            slot = cluster.slots.things[number]
            stale = cluster.processes.facts[slot.process].stale & ~outside
            for other in slots[:at] + slots[at + 1 :] if stale else ():
                stale &= ~masks[other]
            if stale:
                kept = slot._replace(process=cluster.processes.forget(slot.process, stale))
                slots = (*slots[:at], cluster.slots.number(kept), *slots[at + 1 :])
        return slots

    def _renamed(self, state: State, by: Renaming) -> State:
        return State(
            self._renamed_ledger(state.ledger, by),
            self._renamed_ledger(state.saved, by) if state.saved >= 0 else -1,
            self._renamed_net(state.net, by),
            state.wishes,
            tuple([self._renamed_slot(at, number, by) for at, number in enumerate(state.slots)]),
        )

    def _renamed_ledger(self, ledger: int, by: Renaming) -> int:
        key = (ledger, by)
        if key not in self._ledgers:
            self._ledgers[key] = self._cluster.ledger.rename(ledger, by)
        return self._ledgers[key]

    def _renamed_net(self, net: int, by: Renaming) -> int:
        key = (net, by)
        if key not in self._nets:
            self._nets[key] = self._cluster.nets.number(by.net(self._cluster.nets.things[net]))
        return self._nets[key]

    def _renamed_slot(self, at: int, number: int, by: Renaming) -> int:
        key = (at, number, by)
        if key not in self._slots:
            cluster = self._cluster
            slot = cluster.slots.things[number]
            process = cluster.processes.rename(slot.process, by)
            self._slots[key] = cluster.slots.number(by.slot(cluster.nodes[at], slot, process))
        return self._slots[key]
