"""What web asks: admit, abort, detach, attach, snapshot."""

from __future__ import annotations

from app.ledger.memory.ends import CLIENT_GONE, end_request, unwatch
from app.ledger.memory.records import view
from app.ledger.memory.state import RING_MS, STONE_MS, Record, Store
from app.protocol.commands import (
    Abort,
    AbortAnswer,
    AbortStatus,
    Admit,
    AdmitAnswer,
    AdmitStatus,
    Attach,
    AttachAnswer,
    AttachStatus,
    Detach,
    IdempotencyKey,
    ReadStatus,
    Sibling,
    Snapshot,
    SnapshotAnswer,
)
from app.protocol.tables import RequestState


def admit(store: Store, command: Admit) -> AdmitAnswer:
    uid, queued = command.uid, len(store.queue)
    if uid in store.tombstones:
        return AdmitAnswer(AdmitStatus.TOMBSTONED, store.time)
    if uid in store.records:
        return _admitted(store, uid)
    if not store.fresh(command.watcher.web):
        return AdmitAnswer(AdmitStatus.REFUSED, store.time)
    if command.key and (known := _known(store, command.key)):
        return known
    if command.client_id in store.guards:
        return AdmitAnswer(AdmitStatus.DUPLICATE, store.time, store.guards[command.client_id])
    sequences: tuple[Admit | Sibling, ...] = (command, *command.more)
    for each in sequences:
        if room := _too_small(store, each):
            return AdmitAnswer(AdmitStatus.TOO_LARGE, store.time, room_tokens=room)
    if queued + len(sequences) > command.limits.max_queued:
        return AdmitAnswer(AdmitStatus.FULL, store.time, queued=queued)
    for each in sequences:
        _add(store, command, each)
    first = store.records[uid]
    first.choices = first.left = len(sequences)
    if command.key:
        store.keys[command.key.scoped] = uid
    store.guards[command.client_id] = store.latest[command.client_id] = uid
    return _admitted(store, uid)


def _add(store: Store, command: Admit, each: Admit | Sibling) -> None:
    store.seq += 1
    store.records[each.uid] = Record(
        each.uid,
        command.client_id,
        store.seq,
        each.prompt_ids,
        each.sampling,
        command.limits,
        queued_at=store.time,
        watchers={command.watcher},
        timeline={"queued": store.wall},
        key=command.key,
        salt=command.salt,
        group=command.uid if command.more else "",
    )
    store.queue[each.uid] = store.seq
    store.deadlines[each.uid] = store.time + command.limits.queue_timeout_ms
    store.rings[each.uid] = store.time + RING_MS
    store.own(command.watcher.web, f"w:{each.uid}:{command.watcher.connection}")


def _too_small(store: Store, each: Admit | Sibling) -> int:
    """Tokens that the largest pool holds of the role that can never hold it; 0: it fits."""
    prompt, most = len(each.prompt_ids), each.sampling.max_tokens
    needs = {
        "prefill": prompt + most - 1,  # the answer so far, when it goes on elsewhere
        "decode": prompt + most if most > 1 else 0,
    }
    rooms = ((_room_tokens(store, role), tokens) for role, tokens in needs.items())
    return next((room for room, tokens in rooms if room and room < tokens), 0)


def _admitted(store: Store, uid: str) -> AdmitAnswer:
    queued_at = store.records[uid].timeline["queued"]
    return AdmitAnswer(AdmitStatus.ADMITTED, store.time, uid, len(store.queue), admitted_wall_ms=queued_at)


def _known(store: Store, key: IdempotencyKey) -> AdmitAnswer | None:
    """The key stays with a request that was computed, well or not; what was aborted, expired or had no room was not."""
    record = store.records.get(store.keys.get(key.scoped, ""))
    if record is None or _outcome(record) in (RequestState.ABORTED, RequestState.EXPIRED) or record.overloaded:
        return None
    status = AdmitStatus.KNOWN if record.key == key else AdmitStatus.OTHER_BODY
    return AdmitAnswer(status, store.time, record.uid)


def _outcome(first: Record) -> RequestState:
    return first.ended_as or first.state


def _room_tokens(store: Store, role: str) -> int:
    """Size of the largest pool among the living nodes of a role; 0 if none of them names one."""
    living = (node.info for inc, node in store.nodes.items() if node.info.role == role and store.fresh(inc))
    return max((info.num_blocks * info.block_size_tokens for info in living), default=0)


def abort(store: Store, command: Abort) -> AbortAnswer:
    record = store.records.get(command.uid)
    if record is None:
        return _stone(store, command.uid)
    for each in store.group_of(record):
        if each.in_process:
            end_request(store, each, RequestState.ABORTED, code=command.reason)
    return _ended(store, record)


def detach(store: Store, command: Detach) -> AbortAnswer:
    record = store.records.get(command.uid)
    if record is None:
        return _stone(store, command.uid)
    answer = None
    for each in store.group_of(record):
        if each.in_process:
            status = unwatch(store, each, command.watcher, CLIENT_GONE)
            answer = AbortAnswer(status, store.time, each.state)
    return answer or _ended(store, record)


def attach(store: Store, command: Attach) -> AttachAnswer:
    record, web = store.records.get(command.uid), command.watcher.web
    if record is None:
        return AttachAnswer(AttachStatus.UNKNOWN, store.time)
    if not record.in_process:
        return AttachAnswer(AttachStatus.ENDED, store.time, view(store, record, 0))
    if not store.fresh(web):
        return AttachAnswer(AttachStatus.REFUSED, store.time)
    record.watchers.add(command.watcher)
    store.own(web, f"w:{command.uid}:{command.watcher.connection}")
    store.unwatched.pop(command.uid, None)
    return AttachAnswer(AttachStatus.ATTACHED, store.time, view(store, record, 0))


def _stone(store: Store, uid: str) -> AbortAnswer:
    store.tombstones[uid] = store.time + STONE_MS
    return AbortAnswer(AbortStatus.TOMBSTONED, store.time)


def _ended(store: Store, record: Record) -> AbortAnswer:
    state = store.group_of(record)[0].ended_as or record.state
    aborted = state is RequestState.ABORTED
    return AbortAnswer(AbortStatus.ABORTED if aborted else AbortStatus.ENDED, store.time, state)


def snapshot(store: Store, command: Snapshot) -> SnapshotAnswer:
    record = store.records.get(command.uid or store.latest.get(command.client_id, ""))
    if record is None:
        return SnapshotAnswer(ReadStatus.UNKNOWN, store.time)
    return view(store, record, command.from_index)
