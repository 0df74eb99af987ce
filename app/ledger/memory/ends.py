"""How leases, attempts, requests and watching end: the counterpart of _lib/ends.lua."""

from __future__ import annotations

from app.ledger.memory.records import drop_suspect, tell
from app.ledger.memory.state import CLOSED_TTL_MS, MOST_OVERLOADS, Record, Store
from app.protocol.commands import AbortStatus, Event, FailStatus, FailureKind, Watcher
from app.protocol.tables import LeaseState, RequestState, step_lease, step_request
from app.schemas import FinishReason

CLIENT_GONE = "client_gone"
WEB_LOST = "web_lost"
QUEUE_TIMEOUT = "queue_timeout"


def close_lease(store: Store, record: Record, unused: LeaseState) -> None:
    lease = store.leases.get(record.lease)
    if lease is None or lease.state not in (LeaseState.RESERVED, LeaseState.ACTIVE):
        return
    lease.state = step_lease(lease.state, LeaseState.RELEASED if lease.state is LeaseState.ACTIVE else unused)
    store.expire(CLOSED_TTL_MS, "leases", record.lease)
    store.open_leases.pop(record.lease, None)
    store.disown(lease.node, f"l:{record.lease}")
    drop_suspect(store, record, lease.node)


def let_go(store: Store, record: Record, unused_lease: LeaseState) -> None:
    close_lease(store, record, unused_lease)
    if record.owner:
        store.disown(record.owner, f"c:{record.uid}")
        store.expire(CLOSED_TTL_MS, "fences", record.fence)
        drop_suspect(store, record, record.owner)
    for scores in (store.queue, store.waiters, store.deadlines, store.rings):
        scores.pop(record.uid, None)


def _end_sequence(
    store: Store,
    record: Record,
    state: RequestState,
    *,
    code: str,
    detail: str,
    finish_reason: FinishReason | None = None,
    unused_lease: LeaseState = LeaseState.CANCELLED,
    tokens: tuple[int, ...] = (),
    logprobs: tuple[str, ...] = (),
) -> None:
    """One record ends, with everything that it held."""
    record.state = step_request(record.state, state)
    record.finish_reason, record.error_code, record.error_detail = finish_reason, code, detail
    record.timeline["finished"] = store.wall
    let_go(store, record, unused_lease)
    index = len(record.tokens) - len(tokens)
    event = Event(record.uid, index, tokens, state, finish_reason, code, detail, logprobs, record.cached_tokens)
    tell(store, record.watchers, event)
    for watcher in record.watchers:
        store.disown(watcher.web, f"w:{record.uid}:{watcher.connection}")
    record.watchers = set()
    store.unwatched.pop(record.uid, None)


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
    logprobs: tuple[str, ...] = (),
) -> None:
    """The only way into a terminal state; ``tokens`` and ``logprobs`` are the last ones, already appended.

    Of a group each record finishes for itself; one that ends in any other way takes those with it that are in process.
    """
    _end_sequence(
        store,
        record,
        state,
        finish_reason=finish_reason,
        code=code,
        detail=detail,
        unused_lease=unused_lease,
        tokens=tokens,
        logprobs=logprobs,
    )
    group = store.group_of(record)
    if len(group) > 1:
        first = group[0]
        if state is RequestState.FINISHED:
            first.left -= 1
            if first.left > 0:
                return
        else:
            first.left, first.ended_as = 0, state
            for mate in group:
                if mate.in_process:
                    _end_sequence(store, mate, state, code=code, detail=detail)
    _end_names(store, group, state)


def _end_names(store: Store, group: list[Record], state: RequestState) -> None:
    """All records of a request have ended: its names are free, and everything of it goes after its TTL."""
    first = group[0]
    _free_guard(store, first, state)
    ttl = first.limits.record_ttl_ms
    for record in group:
        store.expire(ttl, "records", record.uid)
    if store.latest.get(first.client_id) == first.uid:
        store.expire(ttl, "latest", first.client_id, first.uid)
    if first.key and store.keys.get(first.key.scoped) == first.uid:
        store.expire(ttl, "keys", first.key.scoped, first.uid)


def _free_guard(store: Store, record: Record, state: RequestState) -> None:
    """The client id is free again, except for a while after a FINISHED request that has a deduplication window."""
    if store.guards.get(record.client_id) != record.uid:
        return
    window = record.limits.dedup_window_ms
    if state is RequestState.FINISHED and window > 0:
        store.expire(window, "guards", record.client_id, record.uid)
    else:
        del store.guards[record.client_id]


def end_attempt(
    store: Store,
    record: Record,
    kind: FailureKind,
    reason: str,
    detail: str,
    unused_lease: LeaseState = LeaseState.CANCELLED,
) -> FailStatus:
    """The only way an attempt ends without ending its request well."""
    handed_round = kind is FailureKind.OVERLOAD and _handed_round(record)
    if handed_round:
        kind = FailureKind.FAILURE
    if kind is FailureKind.FAILURE:
        record.failures += 1
    out_of_attempts = kind is FailureKind.FAILURE and record.failures >= record.limits.max_attempts
    if kind is FailureKind.FINAL or out_of_attempts:
        store.group_of(record)[0].overloaded = handed_round
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


def _handed_round(record: Record) -> bool:
    """Count an overload; whether the request has had too many in a row without getting a token."""
    have = len(record.tokens)
    record.overloads = record.overloads + 1 if record.overload_at == have else 1
    record.overload_at = have
    return record.overloads > MOST_OVERLOADS


def unwatch(store: Store, record: Record, watcher: Watcher, code: str) -> AbortStatus:
    """Remove a watcher; the last one gone aborts the request, after its grace. ``code``: why, if that is now."""
    record.watchers.discard(watcher)
    store.disown(watcher.web, f"w:{record.uid}:{watcher.connection}")
    if record.watchers:
        return AbortStatus.WATCHED
    if record.limits.grace_ms > 0:
        # The same detach again does not lengthen the grace.
        store.unwatched.setdefault(record.uid, store.time + record.limits.grace_ms)
        return AbortStatus.GRACE
    end_request(store, record, RequestState.ABORTED, code=code)
    return AbortStatus.ABORTED
