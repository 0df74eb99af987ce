"""Moves that need not wait: done at once, before anything else is tried, so that far fewer states are told apart.

A move is *silent* if its process asks nothing of anybody, of engine and mover neither: an acknowledgement that was
awaited, an answer that changes nothing, the news that a handoff is over. No other process and no client can tell when
it happened; that its own process cannot either, ``commuting`` checks for all pairs of happenings that a search meets.
A crash just before it leaves what a crash just after it leaves.

A node's bell to itself never leaves its host: the node hears it as soon as it wants one.

What may go wrong with the message or bell concerned is tried all the same.
"""

from __future__ import annotations

from app.protocol import effects as do
from app.protocol.commands import HoldingsAnswer
from app.protocol.messages import Grant
from tests.search.draft import DIRECT_QUEUES, Cluster, Draft
from tests.search.moves import Move
from tests.search.process_steps import Happening, Key
from tests.search.state import BELL, MESSAGE, REPLY, Item, Slot, State
from tests.search.values import VALUES

_Replies = tuple[int, ...] | None
"""Numbers of the calls that a happening acknowledges, and that is all it does; None: it does more."""


class Prompt:
    """Finds a move that need not wait."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._answers: dict[int, _Replies] = {}
        self._deliveries: dict[tuple[int, int, int, int], _Replies] = {}
        self._items: dict[int, tuple[tuple[int, Item], ...]] = {}
        self.quiet: set[Key] = set()
        """Every happening that was found to ask nothing of anybody."""

    def move(self, state: State) -> Move | None:
        """One that need not wait, if there is one."""
        for at, number in enumerate(state.slots):
            replies = self._answers[number] if number in self._answers else self._of_answer(state, at, number)
            if replies is not None and self._is_silent(state, replies):
                return Move("answer", at)
        for which, item in self._candidates(state.net):
            if self._need_not_wait(state, item):
                return Move("hear" if item[0] == BELL else "deliver", self._place(item), which)
        return None

    def _candidates(self, net: int) -> tuple[tuple[int, Item], ...]:
        found = self._items.get(net)
        if found is None:
            found = self._items[net] = tuple(
                [
                    (which, item)
                    for which, item in enumerate(self._cluster.nets.things[net])
                    if not item[-1] and (item[0] in (MESSAGE, REPLY) or (item[0] == BELL and item[1] >= DIRECT_QUEUES))
                ]
            )
        return found

    def _need_not_wait(self, state: State, item: Item) -> bool:
        at = self._place(item)
        slot = self._cluster.slots.things[state.slots[at]]
        if slot.frozen_ms >= 0:
            return False
        if item[0] == BELL:
            return self._cluster.processes.facts[slot.process].wants_bells
        return self._is_silent(state, self._of_delivery(state, at, item))

    @staticmethod
    def _place(item: Item) -> int:
        return item[1] - DIRECT_QUEUES if item[0] == BELL else item[2]

    def _is_silent(self, state: State, replies: _Replies) -> bool:
        if not replies:
            return replies is not None
        slots = self._cluster.slots.things
        return not any(opened[0] in replies for number in state.slots for opened in slots[number].open)

    def _of_answer(self, state: State, at: int, number: int) -> _Replies:
        slot = self._cluster.slots.things[number]
        replies: _Replies = None
        if slot.answers and slot.frozen_ms < 0:
            tag, answer = slot.answers[0]
            if answer < 0:
                replies = self._replies(state, at, (Happening.NO_ANSWER, tag, 0))
            elif not _tells_of_work(VALUES[answer]):
                replies = self._replies(state, at, (Happening.ANSWERED, tag, answer))
        self._answers[number] = replies
        return replies

    def _of_delivery(self, state: State, at: int, item: Item) -> _Replies:
        key = (state.slots[at], item[0], item[1], item[-2])
        if key not in self._deliveries:
            slot = self._cluster.slots.things[state.slots[at]]
            happening = happening_of(self._cluster, at, slot, item)
            self._deliveries[key] = None if happening is None else self._replies(state, at, happening)
        return self._deliveries[key]

    def _replies(self, state: State, at: int, happening: tuple[Happening, int, int]) -> _Replies:
        draft = Draft(self._cluster, state)
        step = self._cluster.processes.step(draft.slots[at].process, *happening, lambda: draft.fresh(at))
        if not step.quiet:
            return None
        self.quiet.add((draft.slots[at].process, *happening))
        return tuple([int(want.call_id.removeprefix("call-")) for want in step.wants if isinstance(want, do.ReplyTo)])


def _tells_of_work(answer: object) -> bool:
    """Whether a node that has no room now will remember this when it has."""
    return isinstance(answer, HoldingsAnswer) and answer.queued + answer.waiting_for_grant > 0


def happening_of(cluster: Cluster, at: int, slot: Slot, item: Item) -> tuple[Happening, int, int] | None:
    """What a delivery is to its process, if it may be prompt. A grant is not: whether it comes before or after the
    first token is known makes a difference. A message that the link refuses is not looked at either."""
    if item[0] == REPLY:
        tag = next(opened[1] for opened in slot.open if opened[0] == item[1])
        return Happening.CALL_ENDED, tag, item[3]
    if item[3] != cluster.incarnation(at, slot.life) or isinstance(VALUES[item[4]], Grant):
        return None
    return Happening.CALLED, item[1], item[4]
