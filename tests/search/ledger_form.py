"""The normal form of the ledger's data: of all that behave alike from now on, one.

Ledger time and the server's clock stand at ``NOW_MS``; what is only shown to people, and what can no longer matter, is
left out. Each line below says why it cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from app.ledger.memory.state import DEAD, PASSED_OVER_MS, Node, Record, Scores, Store
from app.protocol.tables import RequestState
from tests.search.configuration import MANY, NEVER_MS
from tests.search.images import Freezer

NOW_MS = 10**6
_PAST_MS = NOW_MS - 1
_LONG_AGO_MS = NOW_MS - PASSED_OVER_MS - 1
_FAR_MS = NEVER_MS // 2
_NO_GAUGES: Any = None
_LAST_RING = 3
"""From this one on the pauses between two bells stay the same."""


class Garbage(NamedTuple):
    """Something that matters only to who still knows ``name``."""

    kind: str
    key: str
    name: str


def normalise(store: Store, one_decode_node: bool) -> None:
    """Bring the data into their normal form."""
    by = NOW_MS - store.time
    store.wall = store.last = store.wall + by
    assert store.wall == NOW_MS, "every advance ends with a heartbeat or scan"
    store.time = NOW_MS
    store.scanned = -1  # every scan of a search runs
    store.event_number = 0
    store.events.clear()  # checked where they are written
    store.expiring.clear()  # nothing here lives as long as a TTL
    for node in store.nodes.values():
        _normalise_node(node, by)
    _number_admissions(store)
    alone = sum(record.in_process for record in store.records.values()) <= 1
    for record in store.records.values():
        _normalise_record(record, by, alone)
    for lease in store.leases.values():
        lease.at = 0  # shown only
    store.open_leases = dict.fromkeys(store.open_leases, 0)  # as above
    store.deadlines = {uid: _deadline(at + by) for uid, at in store.deadlines.items()}
    store.rings = {uid: max(at + by, NOW_MS) for uid, at in store.rings.items()}
    if one_decode_node:
        _forget_pairs(store)
    # A pair's count is kept for a minute; no search looks that far.
    store.avoided = {pair: max(till + by, _PAST_MS) for pair, till in store.avoided.items()}
    store.exited = dict.fromkeys(store.exited, NOW_MS + NEVER_MS)
    store.owned = {incarnation: _ranks(owned) for incarnation, owned in store.owned.items()}


def _forget_pairs(store: Store) -> None:
    """There is no other node to leave a waiter to. (A call of the last life that is applied after the next one has
    registered may so be given what it would have been spared; spared, it is as good as lost.)"""
    store.avoided, store.avoided_times = {}, {}
    for record in store.records.values():
        record.shunned, record.shunned_until = "", 0


def _normalise_node(node: Node, by: int) -> None:
    node.heartbeat, node.gauges = NOW_MS, _NO_GAUGES  # shown only
    if node.fresh_until == DEAD:
        return
    left = node.fresh_until + by - NOW_MS
    node.fresh_until = NOW_MS + (NEVER_MS if left > _FAR_MS else max(left, -1))


def _normalise_record(record: Record, by: int, alone: bool) -> None:
    record.timeline = {}  # shown only, as the next two lines
    record.prefill_node = record.decode_node = ""
    record.last_failure = record.error_detail = record.error_code = ""
    record.ring = min(record.ring, _LAST_RING)
    if record.shunned_until + by < NOW_MS:
        record.shunned, record.shunned_prefill, record.shunned_until = "", "", 0
    else:
        record.shunned_until += by
    if record.limits.queue_timeout_ms > _FAR_MS:
        record.waited = 0
    if record.limits.max_attempts >= MANY:
        record.failures = 0
    # Endless rows of them would be found as a search that never comes to rest.
    record.overloads = record.overload_at = record.losses = 0
    # How long it waits matters where it may be passed over by another one.
    queued = record.state is RequestState.QUEUED and not alone
    record.queued_at = max(record.queued_at + by, _LONG_AGO_MS) if queued else NOW_MS
    waits = record.state is RequestState.PREFILLING and not record.lease and not alone
    record.claimed_at = max(record.claimed_at + by, _LONG_AGO_MS) if waits else NOW_MS


def _deadline(at: int) -> int:
    return NOW_MS + NEVER_MS if at - NOW_MS > _FAR_MS else at


def _number_admissions(store: Store) -> None:
    """Only the order of admissions matters."""
    records = sorted(store.records.values(), key=_seq)
    numbers = {record.seq: number for number, record in enumerate((r for r in records if r.in_process), 1)}
    store.seq = len(numbers)
    for record in records:
        record.seq = numbers.get(record.seq, 0)
    store.queue = {uid: numbers[seq] for uid, seq in store.queue.items()}
    store.waiters = {uid: numbers.get(seq, 0) for uid, seq in store.waiters.items()}


def _seq(record: Record) -> int:
    return record.seq


def _ranks(scores: Scores) -> Scores:
    """Only the order of the members matters."""
    ranks = {score: rank for rank, score in enumerate(sorted(set(scores.values())))}
    return {member: ranks[score] for member, score in scores.items()}


def garbage_of(store: Store) -> tuple[Garbage, ...]:
    """What may go as soon as nobody else knows a name any more."""
    found = [Garbage("fences", fence, fence) for fence in store.fences]
    found += [Garbage("leases", key, key) for key in store.leases.keys() - store.open_leases.keys()]
    found += [Garbage("exited", key, key) for key in store.exited]
    for uid, record in store.records.items():
        if record.failed_by is not None:
            found.append(Garbage("failed_by", uid, record.failed_by[0]))
        if not record.in_process and (record.fence or record.attempt or record.failed_by):
            found.append(Garbage("ended", uid, uid))
    return tuple(sorted(found))


def drop(store: Store, garbage: Iterable[Garbage]) -> None:
    """Let it go: nobody can ask for it any more."""
    for kind, key, _ in garbage:
        if kind == "failed_by":
            store.records[key].failed_by, store.records[key].failed_as = None, ""
        elif kind == "ended":
            _forget(store.records[key])
        else:
            del getattr(store, kind)[key]


def _forget(record: Record) -> None:
    """Of an ended request only that it ended, and how, is ever read again."""
    record.attempt = record.failures = record.losses = record.suspect = record.ring = 0
    record.fence = record.owner = record.lease = record.failed_as = ""
    record.shunned = record.shunned_prefill = ""
    record.failed_by, record.shunned_until, record.stamped, record.tokens = None, 0, False, []


_FIELDS = tuple(name for name in Store.__slots__ if name not in ("events", "expiring"))


def form_of(store: Store) -> tuple[Any, frozenset[str]]:
    """The form of data that are normal, and every id that they mention."""
    freezer = Freezer()
    form = tuple(_freeze_field(freezer, getattr(store, name)) for name in _FIELDS)
    return form, frozenset(freezer.names)


def _freeze_field(freezer: Freezer, field: Any) -> Any:
    if not isinstance(field, Mapping):
        return freezer.freeze(field)
    entries = [(freezer.freeze(key), _freeze_entry(freezer, entry)) for key, entry in field.items()]
    return tuple(sorted(entries, key=_key))


def _freeze_entry(freezer: Freezer, entry: Any) -> Any:
    return freezer.freeze_entry(entry) if hasattr(entry, "__slots__") else freezer.freeze(entry)


def _key(entry: tuple[str, Any]) -> str:
    return entry[0]
