"""Reading records, appending to them, telling those who watch: the counterpart of _lib/records.lua."""

from __future__ import annotations

from collections import deque

from app.ledger.memory.state import EVENTS_MAXLEN, Record, Store
from app.protocol.commands import Event, ReadStatus, SnapshotAnswer, Watcher, Work


def work(record: Record) -> Work:
    """What a node needs to compute the attempt."""
    return Work(
        record.uid,
        record.client_id,
        record.attempt,
        record.fence,
        record.prompt_ids,
        tuple(record.tokens),
        record.sampling,
        record.salt,
    )


def view(store: Store, record: Record, from_index: int) -> SnapshotAnswer:
    """What web reads of it."""
    return SnapshotAnswer(
        ReadStatus.FOUND,
        store.time,
        uid=record.uid,
        client_id=record.client_id,
        state=record.state,
        attempt=record.attempt,
        failures=record.failures,
        prompt_tokens=len(record.prompt_ids),
        output_from=from_index,
        output_ids=tuple(record.tokens[from_index:]),
        logprobs=tuple(record.logprobs[from_index:]),
        finish_reason=record.finish_reason,
        error_code=record.error_code,
        error_detail=record.error_detail,
        prefill_node=record.prefill_node,
        decode_node=record.decode_node,
        cached_tokens=record.cached_tokens,
        choices=record.choices,
        timeline=dict(record.timeline),
    )


def tell(store: Store, watchers: set[Watcher], event: Event) -> None:
    """Wake up each web process among the watchers once."""
    for web in {watcher.web for watcher in watchers}:
        store.event_number += 1
        store.events.setdefault(web, deque(maxlen=EVENTS_MAXLEN)).append((store.event_number, event))


def append(
    store: Store, record: Record, tokens: tuple[int, ...], logprobs: tuple[str, ...], cached_tokens: int
) -> None:
    """Add tokens, with their logprobs if there are any; ``cached_tokens`` belongs to the first one. A suspect that has
    got far enough is none any more."""
    if not record.tokens:
        record.cached_tokens = cached_tokens
    record.tokens.extend(tokens)
    record.logprobs.extend(logprobs)
    record.timeline.setdefault("first_token", store.wall)
    if record.suspect and len(record.tokens) >= record.suspect:
        drop_suspect(store, record, record.owner)
        lease = store.leases.get(record.lease)
        if lease is not None:
            drop_suspect(store, record, lease.node)
        record.suspect = 0


def hold_suspect(store: Store, record: Record, incarnation: str) -> None:
    """Note in its entry that a node holds this suspect: it is given no second one."""
    if record.suspect:
        store.nodes[incarnation].suspect = record.uid


def drop_suspect(store: Store, record: Record, incarnation: str) -> None:
    node = store.nodes.get(incarnation)
    if record.suspect and node is not None:
        node.suspect = ""
