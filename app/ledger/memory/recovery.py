"""What is taken from dead nodes, and the scans: the counterpart of _lib/recovery.lua."""

from __future__ import annotations

from app.ledger.memory.ends import CLIENT_GONE, QUEUE_TIMEOUT, WEB_LOST, end_attempt, end_request, unwatch
from app.ledger.memory.pairs import forget_node, forget_pair
from app.ledger.memory.state import (
    AVOID_MEMORY_MS,
    DEAD,
    MOST_LOSSES,
    PER_KIND,
    RING_MAX_MS,
    RING_MS,
    STONE_MS,
    SUSPECT_TOKENS,
    Record,
    Store,
    ranked,
)
from app.protocol.commands import Bell, FailStatus, FailureKind, ReportExit, Scan, ScanAnswer, Watcher
from app.protocol.tables import FailureReason, LeaseState, RequestState


def ring(store: Store, record: Record) -> Bell:
    store.rings[record.uid] = store.time + min(RING_MS * 2**record.ring, RING_MAX_MS)
    record.ring = min(record.ring + 1, 10)
    return Bell("prefill", record.uid, record.attempt)


def declare_dead(store: Store, incarnation: str) -> None:
    node = store.nodes[incarnation]
    node.state, node.fresh_until = "dead", DEAD


def remove_node(store: Store, incarnation: str) -> None:
    store.nodes.pop(incarnation, None)
    store.owned.pop(incarnation, None)
    store.events.pop(incarnation, None)
    forget_node(store, incarnation)


def bury(store: Store, incarnation: str, budget: int, recovered: list[str]) -> tuple[int, bool]:
    """Take up to ``budget`` holdings from a dead node, then its entry. Answers (how many, whether some are left)."""
    name = store.nodes[incarnation].info.name
    members = ranked(store.owned.get(incarnation, {}), limit=max(budget, 0))
    for member in members:
        kind, rest = member[0], member[2:]
        if kind == "w":
            uid, _, connection = rest.partition(":")
            record = store.records.get(uid)
            if record is not None and record.in_process:
                unwatch(store, record, Watcher(incarnation, connection), WEB_LOST)
        else:
            uid = store.leases[rest].uid if kind == "l" and rest in store.leases else rest
            record = store.records.get(uid)
            if record is not None and record.computing and _its(record, kind, rest, incarnation):
                _lose(store, record, as_owner=kind == "c", name=name)
                recovered.append(uid)
        store.disown(incarnation, member)
    left = incarnation in store.owned
    if not left:
        remove_node(store, incarnation)
    return len(members), left


def _lose(store: Store, record: Record, *, as_owner: bool, name: str) -> None:
    """A failure of what the node may have been computing; of all else, from ``MOST_LOSSES`` such losses on."""
    counts = record.state is RequestState.DECODING or (as_owner and record.stamped)
    if not counts:
        record.losses += 1
        counts = record.losses >= MOST_LOSSES
    kind = FailureKind.FAILURE if counts else FailureKind.OVERLOAD
    status = end_attempt(store, record, kind, FailureReason.NODE_LOST, name)
    last_but_one = record.failures >= record.limits.max_attempts - 1
    if counts and status is FailStatus.REQUEUED and last_but_one:
        record.suspect = len(record.tokens) + SUSPECT_TOKENS


def _its(record: Record, kind: str, rest: str, incarnation: str) -> bool:
    return record.lease == rest if kind == "l" else record.owner == incarnation


def report_exit(store: Store, command: ReportExit) -> ScanAnswer:
    inc = command.incarnation
    store.exited[inc] = store.time + STONE_MS
    if inc not in store.nodes:
        return ScanAnswer(ran=True, time_ms=store.time)
    recovered: list[str] = []
    declare_dead(store, inc)
    _, left = bury(store, inc, PER_KIND, recovered)
    records = [store.records[uid] for uid in recovered]
    bells = [ring(store, record) for record in records if record.state is RequestState.QUEUED]
    return ScanAnswer(True, store.time, tuple(bells), (), tuple(recovered), (inc,), left)


def scan(store: Store, command: Scan) -> ScanAnswer:
    store.advance_clock()
    if store.scanned >= 0 and store.time - store.scanned < command.min_age_ms:
        return ScanAnswer(ran=False, time_ms=store.time)
    store.scanned = store.time
    recovered: list[str] = []
    expired, more_expired = _expire(store)
    dead, more_dead = _recover(store, recovered)
    unwatched = ranked(store.unwatched, upto=store.time, limit=PER_KIND)
    for uid in unwatched:
        if store.records[uid].in_process:  # its group may have taken it along
            end_request(store, store.records[uid], RequestState.ABORTED, code=CLIENT_GONE)
    due = ranked(store.rings, upto=store.time, limit=PER_KIND)
    records = [store.records[uid] for uid in due]
    bells = tuple(ring(store, record) for record in records if record.state is RequestState.QUEUED)
    forgotten = ranked(store.avoided, upto=store.time - AVOID_MEMORY_MS, limit=PER_KIND)
    for pair in forgotten:
        forget_pair(store, pair)
    more = more_expired or more_dead or PER_KIND in (len(unwatched), len(due), len(forgotten))
    for scores in (store.tombstones, store.exited):
        old = ranked(scores, upto=store.time, limit=PER_KIND)
        more = more or len(old) == PER_KIND
        for key in old:
            del scores[key]
    _raise_version(store)
    return ScanAnswer(True, store.time, bells, tuple(expired), tuple(recovered), tuple(dead), more)


def _raise_version(store: Store) -> None:
    """From now on the newest version is written that every node which is not declared dead reads."""
    read = [node.info.newest for node in store.nodes.values() if node.state != "dead"]
    if read:
        store.version = max(store.version, min(store.newest, *read))


def _expire(store: Store) -> tuple[list[str], bool]:
    due = ranked(store.deadlines, upto=store.time, limit=PER_KIND)
    expired = []
    for uid in due:
        record = store.records[uid]
        if not record.in_process:  # its group has taken it along
            continue
        expired.append(uid)
        if record.state is RequestState.QUEUED:
            end_request(store, record, RequestState.EXPIRED, code=QUEUE_TIMEOUT, detail=record.last_failure)
            continue
        timeout = FailureReason.FIRST_TOKEN_TIMEOUT
        if not record.lease:  # another attempt would only wait as long again
            detail = "no decode node took it in time"
            end_request(store, record, RequestState.EXPIRED, code=timeout, detail=detail)
        else:
            end_attempt(store, record, FailureKind.FAILURE, timeout, "", unused_lease=LeaseState.EXPIRED)
    return expired, len(due) == PER_KIND


def _recover(store: Store, recovered: list[str]) -> tuple[list[str], bool]:
    scores = {inc: node.fresh_until for inc, node in store.nodes.items()}
    silent = ranked(scores, upto=store.time - 1, limit=PER_KIND)
    dead, budget, more = [], PER_KIND, len(silent) == PER_KIND
    for inc in silent:
        if store.nodes[inc].state != "dead":
            declare_dead(store, inc)
            dead.append(inc)
        taken, left = bury(store, inc, budget, recovered)
        budget -= taken
        more = more or left
    return dead, more
