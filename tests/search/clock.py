"""How time passes: to the next moment at which anybody wanted to be woken."""

from __future__ import annotations

from app.protocol.events import HandBackAsked, LedgerRestarted, RegistrationLost
from tests.search.configuration import FROZEN_MOST_MS, TICK_MS, Fault
from tests.search.draft import Draft
from tests.search.process_steps import Happening
from tests.search.state import CALL, HANDED_BACK, REGISTERED, STARTING, UNREGISTERED, WANTS_REGISTRATION, Item
from tests.search.values import VALUES

_HAND_BACK = VALUES.number(HandBackAsked())
_RESTARTED = VALUES.number(LedgerRestarted())
_LOST = VALUES.number(RegistrationLost())


def may_pass(draft: Draft) -> bool:
    """Whether no frozen process has to go on first."""
    return all(slot.frozen_ms < FROZEN_MOST_MS for slot in draft.slots)


def pass_time(draft: Draft) -> int:
    """Time passes to the next moment; then all that run beat, a scan runs, and timers that are due run. That something
    reaches a process just before its timer is what happens where it comes before time passes.

    Answers how many ms have passed."""
    ms = _next_moment_ms(draft)
    for at in range(len(draft.slots)):
        _age(draft, at, ms)
    if draft.net:
        draft.net = tuple([_aged(item, ms) for item in draft.net])
    _beat_and_scan(draft, ms)
    if draft.saved >= 0:
        draft.saved = draft.ledger
    for at, slot in enumerate(draft.slots):
        if slot.frozen_ms >= 0:
            continue
        if slot.drain_ms == 0:  # its time is over
            draft.slots[at] = draft.slots[at]._replace(drain_ms=HANDED_BACK)
            draft.hear(at, Happening.TOLD, _HAND_BACK)
        timer_ms = draft.cluster.processes.facts[draft.slots[at].process].timer_ms
        if timer_ms is not None and timer_ms <= 0:
            draft.hear(at, Happening.POLL)
    return ms


def _aged(item: Item, ms: int) -> Item:
    return (CALL, item[1], max(item[2] - ms, -1), item[3]) if item[0] == CALL else item


def _next_moment_ms(draft: Draft) -> int:
    moments = [TICK_MS]
    for slot in draft.slots:
        if slot.frozen_ms < 0:
            moments += [opened[2] for opened in slot.open]
            timer_ms = draft.cluster.processes.facts[slot.process].timer_ms
            if timer_ms is not None:
                moments.append(timer_ms)
            if slot.drain_ms != HANDED_BACK:
                moments.append(slot.drain_ms)
    return min(moment for moment in moments if moment > 0)


def _age(draft: Draft, at: int, ms: int) -> None:
    draft.hear(at, Happening.TIME, ms)
    slot = draft.slots[at]
    draft.slots[at] = slot._replace(
        calls=tuple([(tag, command, max(left - ms, -1)) for tag, command, left in slot.calls]),
        open=tuple([(number, tag, max(left - ms, 0), peer) for number, tag, left, peer in slot.open]),
        frozen_ms=slot.frozen_ms if slot.frozen_ms < 0 else slot.frozen_ms + ms,
        drain_ms=max(slot.drain_ms - ms, 0)
        if 0 < slot.drain_ms < HANDED_BACK and slot.frozen_ms < 0
        else slot.drain_ms,
        beats=WANTS_REGISTRATION if slot.beats == STARTING else slot.beats,
    )


def _beat_and_scan(draft: Draft, ms: int) -> None:
    """Ledger time advances at heartbeats and scans (rule 9); processes hear what the ledger says of them."""
    cluster = draft.cluster
    beating = [at for at, slot in enumerate(draft.slots) if slot.beats == REGISTERED and slot.frozen_ms < 0]
    passed = cluster.ledger.pass_time(draft.ledger, ms, tuple([VALUES[draft.incarnation(at)] for at in beating]))
    draft.ledger = passed.ledger
    for bell in passed.bells:
        draft.ring(-1, bell)
    for at, lost in zip(beating, passed.lost, strict=True):
        if lost:
            draft.slots[at] = draft.slots[at]._replace(beats=UNREGISTERED)
            draft.hear(at, Happening.TOLD, _LOST)
        elif not draft.slots[at].knows_life:
            draft.slots[at] = draft.slots[at]._replace(knows_life=True)
            draft.hear(at, Happening.TOLD, _RESTARTED)


def keeps_copies(faults: frozenset[Fault], left: int) -> bool:
    """Whether a saved copy of the ledger may still be needed."""
    return left > 0 and Fault.ROLLBACK in faults
