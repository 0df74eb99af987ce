"""What web asks: admit, abort, detach, snapshot."""

from __future__ import annotations

from app.ledger.memory.ends import end_request, unwatch
from app.ledger.memory.state import RING_MS, STONE_MS, Record, Store
from app.protocol.commands import (
    Abort,
    AbortAnswer,
    AbortStatus,
    Admit,
    AdmitAnswer,
    AdmitStatus,
    Detach,
    ReadStatus,
    Snapshot,
    SnapshotAnswer,
)
from app.protocol.tables import RequestState


def admit(store: Store, command: Admit) -> AdmitAnswer:
    uid, queued = command.uid, len(store.queue)
    if uid in store.tombstones:
        return AdmitAnswer(AdmitStatus.TOMBSTONED, store.time)
    if uid in store.records:
        return AdmitAnswer(AdmitStatus.ADMITTED, store.time, uid, queued)
    if not store.fresh(command.watcher.web):
        return AdmitAnswer(AdmitStatus.REFUSED, store.time)
    if command.client_id in store.guards:
        return AdmitAnswer(AdmitStatus.DUPLICATE, store.time, store.guards[command.client_id])
    prompt = len(command.prompt_ids)
    needs = {
        "prefill": prompt,
        "decode": prompt + command.sampling.max_tokens if command.sampling.max_tokens > 1 else 0,
    }
    for role, tokens in needs.items():
        room = _room_tokens(store, role)
        if room and room < tokens:
            return AdmitAnswer(AdmitStatus.TOO_LARGE, store.time, room_tokens=room)
    if queued >= command.limits.max_queued:
        return AdmitAnswer(AdmitStatus.FULL, store.time, queued=queued)
    store.seq += 1
    record = Record(
        uid,
        command.client_id,
        store.seq,
        command.prompt_ids,
        command.sampling,
        command.limits,
        queued_at=store.time,
        watchers={command.watcher},
        timeline={"queued": store.wall},
    )
    store.records[uid] = record
    store.guards[command.client_id] = store.latest[command.client_id] = uid
    store.queue[uid] = record.seq
    store.deadlines[uid] = store.time + command.limits.queue_timeout_ms
    store.rings[uid] = store.time + RING_MS
    store.own(command.watcher.web, f"w:{uid}:{command.watcher.connection}")
    return AdmitAnswer(AdmitStatus.ADMITTED, store.time, uid, queued + 1)


def _room_tokens(store: Store, role: str) -> int:
    """Size of the largest pool among the living nodes of a role; 0 if none of them names one."""
    living = (node.info for inc, node in store.nodes.items() if node.info.role == role and store.fresh(inc))
    return max((info.num_blocks * info.block_size_tokens for info in living), default=0)


def abort(store: Store, command: Abort) -> AbortAnswer:
    record = store.records.get(command.uid)
    if record is None:
        return _stone(store, command.uid)
    if record.in_process:
        end_request(store, record, RequestState.ABORTED, code=command.reason)
    return _ended(store, record)


def detach(store: Store, command: Detach) -> AbortAnswer:
    record = store.records.get(command.uid)
    if record is None:
        return _stone(store, command.uid)
    if record.in_process and not unwatch(store, record, command.watcher):
        return AbortAnswer(AbortStatus.WATCHED, store.time, record.state)
    return _ended(store, record)


def _stone(store: Store, uid: str) -> AbortAnswer:
    store.tombstones[uid] = store.time + STONE_MS
    return AbortAnswer(AbortStatus.TOMBSTONED, store.time)


def _ended(store: Store, record: Record) -> AbortAnswer:
    aborted = record.state is RequestState.ABORTED
    return AbortAnswer(AbortStatus.ABORTED if aborted else AbortStatus.ENDED, store.time, record.state)


def snapshot(store: Store, command: Snapshot) -> SnapshotAnswer:
    record = store.records.get(command.uid or store.latest.get(command.client_id, ""))
    if record is None:
        return SnapshotAnswer(ReadStatus.UNKNOWN, store.time)
    return SnapshotAnswer(
        ReadStatus.FOUND,
        store.time,
        uid=record.uid,
        client_id=record.client_id,
        state=record.state,
        attempt=record.attempt,
        failures=record.failures,
        prompt_tokens=len(record.prompt_ids),
        output_from=command.from_index,
        output_ids=tuple(record.tokens[command.from_index :]),
        finish_reason=record.finish_reason,
        error_code=record.error_code,
        error_detail=record.error_detail,
        prefill_node=record.prefill_node,
        decode_node=record.decode_node,
        timeline=dict(record.timeline),
    )
