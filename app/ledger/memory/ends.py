"""How attempts and requests end, and what is taken from dead nodes: the counterpart of the functions in _lib.lua."""

from __future__ import annotations

from collections import deque

from app.ledger.memory.state import (
    CLOSED_TTL_MS,
    DEAD,
    EVENTS_MAXLEN,
    RING_MAX_MS,
    RING_MS,
    Record,
    Store,
    ranked,
)
from app.protocol.commands import Bell, Event, FailStatus, FailureKind, Watcher
from app.protocol.tables import FailureReason, LeaseState, RequestState, step_lease, step_request
from app.schemas import FinishReason

CLIENT_GONE = "client_gone"
QUEUE_TIMEOUT = "queue_timeout"


def tell(store: Store, watchers: set[Watcher], event: Event) -> None:
    """Wake up each web process among the watchers once."""
    for web in {watcher.web for watcher in watchers}:
        store.event_number += 1
        store.events.setdefault(web, deque(maxlen=EVENTS_MAXLEN)).append((store.event_number, event))


def append(store: Store, record: Record, tokens: tuple[int, ...]) -> None:
    record.tokens.extend(tokens)
    record.timeline.setdefault("first_token", store.wall)


def close_lease(store: Store, record: Record, unused: LeaseState) -> None:
    lease = store.leases.get(record.lease)
    if lease is None or lease.state not in (LeaseState.RESERVED, LeaseState.ACTIVE):
        return
    lease.state = step_lease(lease.state, LeaseState.RELEASED if lease.state is LeaseState.ACTIVE else unused)
    store.expire(CLOSED_TTL_MS, "lease", record.lease)
    store.open_leases.pop(record.lease, None)
    store.disown(lease.node, f"l:{record.lease}")


def let_go(store: Store, record: Record, unused_lease: LeaseState) -> None:
    close_lease(store, record, unused_lease)
    if record.owner:
        store.disown(record.owner, f"c:{record.uid}")
    for scores in (store.queue, store.waiters, store.deadlines, store.rings):
        scores.pop(record.uid, None)


def end_request(
    store: Store,
    record: Record,
    state: RequestState,
    *,
    finish_reason: FinishReason | None = None,
    code: str = "",
    detail: str = "",
    unused_lease: LeaseState = LeaseState.CANCELLED,
    tokens: tuple[int, ...] = (),
) -> None:
    """The only way into a terminal state; ``tokens`` are the last ones, already appended."""
    record.state = step_request(record.state, state)
    record.finish_reason, record.error_code, record.error_detail = finish_reason, code, detail
    record.timeline["finished"] = store.wall
    let_go(store, record, unused_lease)
    index = len(record.tokens) - len(tokens)
    tell(store, record.watchers, Event(record.uid, index, tokens, state, finish_reason, code, detail))
    for watcher in record.watchers:
        store.disown(watcher.web, f"w:{record.uid}:{watcher.connection}")
    record.watchers = set()
    if store.guards.get(record.client_id) == record.uid:
        del store.guards[record.client_id]
    ttl = record.limits.record_ttl_ms
    store.expire(ttl, "record", record.uid)
    if store.latest.get(record.client_id) == record.uid:
        store.expire(ttl, "latest", record.client_id, record.uid)


def end_attempt(
    store: Store,
    record: Record,
    kind: FailureKind,
    reason: str,
    detail: str,
    unused_lease: LeaseState = LeaseState.CANCELLED,
) -> FailStatus:
    """The only way an attempt ends without ending its request well."""
    if kind is FailureKind.FAILURE:
        record.failures += 1
    out_of_attempts = kind is FailureKind.FAILURE and record.failures >= record.limits.max_attempts
    if kind is FailureKind.FINAL or out_of_attempts:
        end_request(store, record, RequestState.FAILED, code=reason, detail=detail, unused_lease=unused_lease)
        return FailStatus.FAILED
    let_go(store, record, unused_lease)
    record.state = step_request(record.state, RequestState.QUEUED)
    record.attempt += 1
    record.fence = record.owner = record.lease = ""
    record.queued_at, record.ring, record.last_failure = store.time, 0, f"{reason}: {detail}"
    store.queue[record.uid] = record.seq
    store.deadlines[record.uid] = store.time + record.limits.queue_timeout_ms - record.waited
    store.rings[record.uid] = store.time
    return FailStatus.REQUEUED


def unwatch(store: Store, record: Record, watcher: Watcher) -> bool:
    """Remove a watcher; the last one gone aborts the request. Answers whether it did."""
    record.watchers.discard(watcher)
    store.disown(watcher.web, f"w:{record.uid}:{watcher.connection}")
    if record.watchers:
        return False
    end_request(store, record, RequestState.ABORTED, code=CLIENT_GONE)
    return True


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
                unwatch(store, record, Watcher(incarnation, connection))
        else:
            uid = store.leases[rest].uid if kind == "l" and rest in store.leases else rest
            record = store.records.get(uid)
            if record is not None and record.computing and _its(record, kind, rest, incarnation):
                end_attempt(store, record, FailureKind.FAILURE, FailureReason.NODE_LOST, name)
                recovered.append(uid)
        store.disown(incarnation, member)
    left = incarnation in store.owned
    if not left:
        remove_node(store, incarnation)
    return len(members), left


def _its(record: Record, kind: str, rest: str, incarnation: str) -> bool:
    return record.lease == rest if kind == "l" else record.owner == incarnation
