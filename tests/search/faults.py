"""What may go wrong in a state."""

from __future__ import annotations

from collections.abc import Callable

from tests.search.clock import keeps_copies, pass_time
from tests.search.configuration import Fault
from tests.search.draft import Cluster, Draft
from tests.search.moves import Move, start_anew
from tests.search.process_steps import NOBODY
from tests.search.state import BELL, CALL, EXIT, MESSAGE, REPLY, Item, Slot, State


class Faults:
    """What may go wrong in a state."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._of_slot: dict[tuple[int, int], tuple[Move, ...]] = {}
        self._anywhere = tuple([Move(Fault.ROLLBACK)] if Fault.ROLLBACK in cluster.configuration.kinds else [])

    def moves(self, state: State, due: bool) -> list[Move]:
        """Everything; ``due``: something else is pending."""
        if not self._left(state):
            return []
        moves = list(self._anywhere)
        for at, number in enumerate(state.slots):
            of_slot = self._of_slot.get((at, number))
            if of_slot is None:
                of_slot = self._of_slot[at, number] = self._work_out(at, self._cluster.slots.things[number])
            moves += of_slot
        for which, item in enumerate(self._cluster.nets.things[state.net]):
            moves += self._of_item(which, item)
        if due and Fault.EVERYTHING_LATE in self._cluster.configuration.kinds:
            moves.append(Move(Fault.EVERYTHING_LATE))
        return moves

    def with_item(self, state: State, which: int) -> list[Move]:
        """What may go wrong with one thing that is on its way; -1: with none."""
        if which < 0 or not self._left(state):
            return []
        return self._of_item(which, self._cluster.nets.things[state.net][which])

    def _left(self, state: State) -> int:
        return self._cluster.wishes.things[state.wishes].faults

    def _of_item(self, which: int, item: Item) -> list[Move]:
        if item[-1]:
            return []
        kinds = self._cluster.configuration.kinds
        return [Move(kind, -1, which) for kind in _KINDS_OF_ITEM.get(item[0], ()) if kind in kinds]

    def _work_out(self, at: int, slot: Slot) -> tuple[Move, ...]:
        kinds = [Fault.CRASH_SILENT, Fault.CRASH_REPORTED]
        if slot.calls:
            kinds += [Fault.CALL_LOST, Fault.ANSWER_LOST, Fault.CALL_LATE]
        if slot.frozen_ms < 0:
            kinds.append(Fault.FREEZE)
        return tuple([Move(kind, at) for kind in kinds if kind in self._cluster.configuration.kinds])


_KINDS_OF_ITEM = {
    MESSAGE: (Fault.MESSAGE_LOST, Fault.MESSAGE_DOUBLED, Fault.MESSAGE_LATE),
    REPLY: (Fault.REPLY_LOST,),
    BELL: (Fault.BELL_LOST, Fault.BELL_DOUBLED),
}


def do_fault(draft: Draft, move: Move) -> int:
    """Let it go wrong; answers how many ms have passed."""
    wishes = draft.wishes = draft.wishes._replace(faults=draft.wishes.faults - 1)
    ms = _DO[Fault(move.kind)](draft, move.at, move.which)
    if not keeps_copies(draft.cluster.configuration.kinds, wishes.faults):
        draft.saved = -1
    return ms or 0


def _call_lost(draft: Draft, at: int, which: int) -> None:
    slot = draft.slots[at]
    (tag, _, _), *calls = slot.calls
    answers = slot.answers if tag == NOBODY else (*slot.answers, (tag, -1))
    draft.slots[at] = slot._replace(calls=tuple(calls), answers=answers)


def _answer_lost(draft: Draft, at: int, which: int) -> None:
    _, command, left = draft.slots[at].calls[0]
    draft.apply(command, left < 0)
    _call_lost(draft, at, which)


def _call_late(draft: Draft, at: int, which: int) -> None:
    _, command, left = draft.slots[at].calls[0]
    draft.send((CALL, command, left, 1))
    _call_lost(draft, at, which)


def _lost(draft: Draft, at: int, which: int) -> None:
    draft.take(which)


def _doubled(draft: Draft, at: int, which: int) -> None:
    draft.send(_held(draft.net[which]))


def _late(draft: Draft, at: int, which: int) -> None:
    draft.send(_held(draft.take(which)))


def _held(item: Item) -> Item:
    return (*item[:-1], 1)


def _crash(draft: Draft, at: int, which: int) -> None:
    start_anew(draft, at)


def _crash_reported(draft: Draft, at: int, which: int) -> None:
    draft.send((EXIT, draft.incarnation(at), 0))
    start_anew(draft, at)


def _freeze(draft: Draft, at: int, which: int) -> None:
    draft.slots[at] = draft.slots[at]._replace(frozen_ms=0)


def _rollback(draft: Draft, at: int, which: int) -> None:
    """The ledger's server starts anew from what it had saved; what had not got there is lost with the connections."""
    draft.ledger = draft.saved
    draft.net = tuple([item for item in draft.net if item[0] != CALL])
    for place, slot in enumerate(draft.slots):
        unknown = tuple([(tag, -1) for tag, _, _ in slot.calls if tag != NOBODY])
        draft.slots[place] = slot._replace(calls=(), answers=slot.answers + unknown, knows_life=False)


def _everything_late(draft: Draft, at: int, which: int) -> int:
    return pass_time(draft)


_DO: dict[Fault, Callable[[Draft, int, int], int | None]] = {
    Fault.CALL_LOST: _call_lost,
    Fault.ANSWER_LOST: _answer_lost,
    Fault.CALL_LATE: _call_late,
    Fault.MESSAGE_LOST: _lost,
    Fault.MESSAGE_DOUBLED: _doubled,
    Fault.MESSAGE_LATE: _late,
    Fault.REPLY_LOST: _lost,
    Fault.BELL_LOST: _lost,
    Fault.BELL_DOUBLED: _doubled,
    Fault.CRASH_REPORTED: _crash_reported,
    Fault.CRASH_SILENT: _crash,
    Fault.FREEZE: _freeze,
    Fault.ROLLBACK: _rollback,
    Fault.EVERYTHING_LATE: _everything_late,
}
