"""What can happen next in a state, and what comes of it.

*Due* moves are what a cluster does by itself, in any order: time passes only when none is left, or as a fault. *Free*
moves may come at any time or never: what is late, a thaw, what clients and operators do. *Faults* cost one of those
that a configuration allows.

Two happenings are one move where nothing else could tell them apart: a step of the engine and that the machine hears
of it (what comes in between could as well come before the step's end); the same for the mover.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from app.protocol import effects as do
from app.protocol.commands import Abort, Admit, AdmitStatus, Bell, Deregister, Drain, Register, ReportExit, Watcher
from app.protocol.events import DrainAsked, Registered
from app.protocol.messages import Refusal, refused
from app.schemas import NodeInfo
from tests.search.configuration import DRAIN_MS, NODE_TTL_MS, Request
from tests.search.draft import DIRECT_QUEUES, PREFILL_QUEUE, Cluster, Draft
from tests.search.ledger_steps import WEB
from tests.search.process_steps import NOBODY, Happening
from tests.search.state import (
    BELL,
    CALL,
    EXIT,
    MESSAGE,
    REGISTERED,
    REPLY,
    STARTING,
    WANTS_REGISTRATION,
    Item,
    Slot,
    State,
)
from tests.search.values import VALUES
from tests.search.violation import Violation
from tests.sim.model import BLOCK_TOKENS


class Move(NamedTuple):
    """What happens; ``at`` is a process's place, ``which`` an item or a number."""

    kind: str
    at: int = -1
    which: int = -1


Moves = tuple[Move, ...]


class Possible:
    """What is possible in a state. Put together from what each part of it adds, which is worked out once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._due_of_slot: dict[tuple[int, int], Moves] = {}
        self._free_of_slot: dict[tuple[int, int], Moves] = {}

    def due(self, state: State) -> list[Move]:
        """What the cluster does by itself."""
        moves: list[Move] = []
        for at, number in enumerate(state.slots):
            of_slot = self._due_of_slot.get((at, number))
            if of_slot is None:
                of_slot = self._due_of_slot[at, number] = self._work_out_due(at, self._cluster.slots.things[number])
            moves += of_slot
        for which, item in enumerate(self._cluster.nets.things[state.net]):
            if not item[-1]:
                moves += self._of_item(state, which, item)
        return moves

    def free(self, state: State) -> list[Move]:
        """What may come at any time, or never."""
        moves: list[Move] = []
        for at, number in enumerate(state.slots):
            of_slot = self._free_of_slot.get((at, number))
            if of_slot is None:
                of_slot = self._free_of_slot[at, number] = _work_out_free(at, self._cluster.slots.things[number])
            moves += of_slot
        for which, item in enumerate(self._cluster.nets.things[state.net]):
            if item[-1]:
                moves += self._of_item(state, which, item)
        return moves + self._of_clients(state)

    def _work_out_due(self, at: int, slot: Slot) -> Moves:
        if slot.frozen_ms >= 0:
            return ()
        facts = self._cluster.processes.facts[slot.process]
        asks = slot.calls or slot.answers
        moves = [
            (slot.calls, Move("apply", at)),
            (slot.answers, Move("answer", at)),
            (facts.timer_ms is not None and facts.timer_ms <= 0, Move("poll", at)),
            (facts.engine_works, Move("engine", at)),
            (facts.job is not None, Move("mover", at)),
            (slot.beats == WANTS_REGISTRATION, Move("register", at)),
            (slot.drain_ms >= 0 and facts.may_leave and not asks, Move("leave", at)),
            *[(opened[2] <= 0, Move("timeout", at, opened[0])) for opened in slot.open],
        ]
        return tuple([move for possible, move in moves if possible])

    def _of_item(self, state: State, which: int, item: Item) -> list[Move]:
        kind = item[0]
        if kind == BELL:
            return [Move("hear", at, which) for at in self._listening(state, item[1])]
        if kind in (MESSAGE, REPLY):
            return [Move("deliver", item[2], which)] if self._runs(state, item[2]) else []
        return [Move("arrive", -1, which)]

    def _runs(self, state: State, at: int) -> bool:
        return self._cluster.slots.things[state.slots[at]].frozen_ms < 0

    def _listening(self, state: State, queue: int) -> list[int]:
        """Who takes a bell from a queue now."""
        cluster = self._cluster
        if queue >= DIRECT_QUEUES:
            places: Sequence[int] = (queue - DIRECT_QUEUES,)
        else:
            places = cluster.places_of_role["prefill" if queue == PREFILL_QUEUE else "decode"]
        facts, slots = cluster.processes.facts, cluster.slots.things
        return [at for at in places if facts[slots[state.slots[at]].process].wants_bells and self._runs(state, at)]

    def _of_clients(self, state: State) -> list[Move]:
        wishes = self._cluster.wishes.things[state.wishes]
        requests = self._cluster.configuration.requests
        in_process = self._cluster.ledger.facts[state.ledger].in_process
        sent = wishes.requests
        moves = []
        if sent < len(requests) and (not requests[sent].after or requests[sent].after not in in_process):
            moves.append(Move("admit", -1, sent))
        if wishes.aborts:
            for which, request in enumerate(requests[:sent]):
                if request.may_be_aborted and request.uid in in_process:
                    moves.append(Move("abort", -1, which))
        if wishes.drains:
            running = [at for at in range(len(state.slots)) if self._runs(state, at)]
            slots = self._cluster.slots.things
            moves += [Move("drain", at) for at in running if slots[state.slots[at]].drain_ms < 0]
        return moves


def _work_out_free(at: int, slot: Slot) -> Moves:
    if slot.frozen_ms < 0:
        return ()
    return (Move("thaw", at), Move("apply", at)) if slot.calls else (Move("thaw", at),)


# doing them


def do_move(draft: Draft, move: Move) -> None:
    """Let one due or free move happen."""
    _DO[move.kind](draft, move.at, move.which)


def _apply(draft: Draft, at: int, which: int) -> None:
    slot = draft.slots[at]
    (tag, command, left), *calls = slot.calls
    answer = draft.apply(command, left < 0)
    answers = slot.answers if tag == NOBODY else (*slot.answers, (tag, answer))
    draft.slots[at] = slot._replace(calls=tuple(calls), answers=answers)


def _answer(draft: Draft, at: int, which: int) -> None:
    slot = draft.slots[at]
    (tag, answer), *answers = slot.answers
    draft.slots[at] = slot._replace(answers=tuple(answers))
    if answer < 0:
        draft.hear(at, Happening.NO_ANSWER, tag)
    else:
        draft.hear(at, Happening.ANSWERED, tag, answer)


def _poll(draft: Draft, at: int, which: int) -> None:
    draft.hear(at, Happening.POLL)


def _engine(draft: Draft, at: int, which: int) -> None:
    draft.hear(at, Happening.ENGINE)


def _mover(draft: Draft, at: int, which: int) -> None:
    facts = draft.cluster.processes.facts[draft.slots[at].process]
    job = facts.job
    if not isinstance(job, do.Pull):
        draft.hear(at, Happening.SEAL)
        return
    owner = VALUES.number(job.location.incarnation)
    source = -1
    for place, slot in enumerate(draft.slots):
        if draft.incarnation(place) == owner:
            source = draft.cluster.processes.view(slot.process, job.source)
    draft.hear(at, Happening.VALIDATE if facts.copied else Happening.COPY, source)


def _timeout(draft: Draft, at: int, which: int) -> None:
    draft.hear(at, Happening.CALL_ENDED, _close(draft, at, which), -1)


def _close(draft: Draft, at: int, number: int) -> int:
    """A call has ended; answers its tag. A reply to it finds nobody."""
    slot = draft.slots[at]
    tag = next(opened[1] for opened in slot.open if opened[0] == number)
    draft.slots[at] = slot._replace(open=tuple([opened for opened in slot.open if opened[0] != number]))
    draft.net = tuple([item for item in draft.net if item[:2] != (REPLY, number)])
    return tag


def _deliver(draft: Draft, at: int, which: int) -> None:
    item = draft.take(which)
    number = item[1]
    if item[0] == REPLY:
        draft.hear(at, Happening.CALL_ENDED, _close(draft, at, number), item[3])
    elif item[3] == draft.incarnation(at):
        draft.hear(at, Happening.CALLED, number, item[4])
    else:  # the link of the next life refuses it
        draft.reply(number, refused(Refusal.INCARNATION))


def _hear(draft: Draft, at: int, which: int) -> None:
    item = draft.take(which)
    draft.hear(at, Happening.BELL, item[2])


def _arrive(draft: Draft, at: int, which: int) -> None:
    item = draft.take(which)
    if item[0] == CALL:
        draft.apply(item[1], item[2] < 0)
    elif item[0] == EXIT:
        draft.execute(ReportExit(VALUES[item[1]]))


def _register(draft: Draft, at: int, which: int) -> None:
    cluster = draft.cluster
    name, incarnation = cluster.nodes[at], VALUES[draft.incarnation(at)]
    prefill = name.startswith("p")
    configuration = cluster.configuration
    info = NodeInfo(
        incarnation=incarnation,
        role="prefill" if prefill else "decode",
        name=name,
        pid=1,
        host="h",
        address=name,
        layout="layout",
        num_blocks=configuration.prefill_blocks if prefill else configuration.decode_blocks,
        block_size_tokens=BLOCK_TOKENS,
    )
    answer = draft.execute(Register(info, NODE_TTL_MS))
    if getattr(answer, "status", "") == "OK":
        draft.slots[at] = draft.slots[at]._replace(beats=REGISTERED, knows_life=True)
        draft.hear(at, Happening.TOLD, VALUES.number(Registered()))
    else:
        draft.slots[at] = draft.slots[at]._replace(beats=STARTING)


def _leave(draft: Draft, at: int, which: int) -> None:
    """A drained process ends; whatever the ledger says, for its next life follows."""
    draft.execute(Deregister(VALUES[draft.incarnation(at)]))
    start_anew(draft, at)


def start_anew(draft: Draft, at: int) -> None:
    """The next life of a process begins; calls to the last one break."""
    gone = draft.incarnation(at)
    for place, slot in enumerate(draft.slots):
        if any(opened[3] == gone for opened in slot.open):
            opened = [(number, tag, 0 if peer == gone else left, peer) for number, tag, left, peer in slot.open]
            draft.slots[place] = slot._replace(open=tuple(opened))
    draft.net = tuple([item for item in draft.net if item[0] != REPLY or item[2] != at])
    life = draft.fresh_life(at)
    incarnation = VALUES[draft.cluster.incarnation(at, life)]
    draft.slots[at] = Slot(life, draft.cluster.processes.boot(draft.cluster.nodes[at], incarnation))


def _thaw(draft: Draft, at: int, which: int) -> None:
    draft.slots[at] = draft.slots[at]._replace(frozen_ms=-1)


def _drain(draft: Draft, at: int, which: int) -> None:
    draft.wishes = draft.wishes._replace(drains=draft.wishes.drains - 1)
    draft.execute(Drain(VALUES[draft.incarnation(at)]))
    draft.slots[at] = draft.slots[at]._replace(drain_ms=DRAIN_MS)
    draft.hear(at, Happening.TOLD, VALUES.number(DrainAsked()))


def admit(draft: Draft, at: int, which: int) -> None:
    """A client sends a request: it must be taken, since the last one with this id has ended."""
    configuration = draft.cluster.configuration
    request: Request = configuration.requests[which]
    draft.wishes = draft.wishes._replace(requests=which + 1)
    answer = draft.execute(
        Admit(
            uid=request.uid,
            client_id=request.client_id,
            prompt_ids=request.prompt,
            sampling=request.sampling,
            watcher=Watcher(WEB, request.uid),
            limits=configuration.limits,
        )
    )
    if getattr(answer, "status", "") != AdmitStatus.ADMITTED:
        raise Violation(f"{request.uid} is not admitted: {answer}")
    draft.ring(-1, Bell("prefill", request.uid, 1))


def _abort(draft: Draft, at: int, which: int) -> None:
    draft.wishes = draft.wishes._replace(aborts=draft.wishes.aborts - 1)
    draft.execute(Abort(draft.cluster.configuration.requests[which].uid, "client_abort"))


_DO = {
    "apply": _apply,
    "answer": _answer,
    "poll": _poll,
    "engine": _engine,
    "mover": _mover,
    "timeout": _timeout,
    "deliver": _deliver,
    "hear": _hear,
    "arrive": _arrive,
    "register": _register,
    "leave": _leave,
    "thaw": _thaw,
    "drain": _drain,
    "admit": admit,
    "abort": _abort,
}
