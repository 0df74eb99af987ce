"""How a decode node takes an attempt over: reserve_next and activate."""

from __future__ import annotations

from app.ledger.memory.lines import Pick, blocks, walk
from app.ledger.memory.pairs import forget_pair, left_to_others
from app.ledger.memory.records import append, drop_suspect, hold_suspect, tell, work
from app.ledger.memory.state import PASSED_OVER_MS, Lease, Node, Record, Store
from app.protocol.commands import (
    Activate,
    ActivateAnswer,
    ActivateStatus,
    Event,
    ReserveAnswer,
    ReserveNext,
    ReserveStatus,
)
from app.protocol.tables import LeaseState, RequestState, step_lease, step_request


def reserve_next(store: Store, command: ReserveNext) -> ReserveAnswer:
    held = store.leases.get(command.lease_id)
    if held is not None:
        owner = store.records.get(held.uid)
        if owner and held.state is LeaseState.RESERVED and held.node == command.incarnation:
            return _reserved(store, owner, command, held.blocks)
        return ReserveAnswer(ReserveStatus.NOTHING, store.time)
    node = store.worker(command.incarnation, "decode")
    if node is None:
        return ReserveAnswer(ReserveStatus.REFUSED, store.time)
    uid = walk(store.waiters, node, _reserve_picker(store, command, node))
    if uid is None:
        return ReserveAnswer(ReserveStatus.NOTHING, store.time, queue_empty=not store.waiters)
    record = store.records[uid]
    need = _first_blocks(record, command)
    store.leases[command.lease_id] = Lease(uid, record.attempt, record.fence, command.incarnation, need, at=store.time)
    store.open_leases[command.lease_id] = store.time
    store.own(command.incarnation, f"l:{command.lease_id}")
    del store.waiters[uid]
    hold_suspect(store, record, command.incarnation)
    record.lease, record.decode_node = command.lease_id, node.info.name
    record.timeline["granted"] = store.wall
    return _reserved(store, record, command, need)


def _most_blocks(record: Record, command: ReserveNext) -> int:
    """What the lease may grow to."""
    return blocks(len(record.prompt_ids) + record.sampling.max_tokens, command.block_size_tokens)


def _first_blocks(record: Record, command: ReserveNext) -> int:
    """What it starts with."""
    return min(blocks(record.total, command.block_size_tokens) + 1, _most_blocks(record, command))


def _reserved(store: Store, record: Record, command: ReserveNext, held: int) -> ReserveAnswer:
    prefill = store.nodes.get(record.owner)
    return ReserveAnswer(
        ReserveStatus.RESERVED,
        store.time,
        record.uid,
        record.client_id,
        record.attempt,
        record.fence,
        held,
        _most_blocks(record, command),
        record.seq,
        record.owner,
        prefill.info.address if prefill else "",
    )


def _reserve_picker(store: Store, command: ReserveNext, node: Node) -> Pick:
    def waiting(uid: str) -> Record | None:
        record = store.records.get(uid)
        if record is None or record.state is not RequestState.PREFILLING or record.lease:
            return None
        return record

    def fits(record: Record) -> bool:
        return _first_blocks(record, command) <= command.free_blocks

    def could(record: Record) -> bool:
        """This node may take it now or once it has blocks. Who cannot is passed over, and holds nobody up."""
        need = _most_blocks(record, command)
        if need > max(node.info.num_blocks, command.free_blocks) or (record.suspect and node.suspect):
            return False
        return not left_to_others(store, record, command.incarnation, need)

    hinted = waiting(command.hint_uid) if command.hint_uid in store.waiters else None
    hint = hinted.uid if hinted and could(hinted) and fits(hinted) else None

    head = True

    def pick(uids: list[str]) -> tuple[str | None, bool]:
        nonlocal head
        for uid in uids:
            record = waiting(uid)
            if record is None:
                del store.waiters[uid]
                continue
            if not could(record):
                continue
            now_fits = fits(record)
            if head and store.time - record.claimed_at >= PASSED_OVER_MS:
                return (uid, False) if now_fits else (None, True)
            head = False
            if now_fits:
                return (uid if record.attempt > 1 else hint or uid), False
        return hint, False

    return pick


def activate(store: Store, command: Activate) -> ActivateAnswer:
    record = store.records.get(command.uid)
    named = (command.attempt, command.fence, command.lease_id)
    if record is None or (record.attempt, record.fence, record.lease) != named:
        return ActivateAnswer(ActivateStatus.FENCED, store.time)
    if record.state is RequestState.DECODING and record.owner == command.incarnation:
        return ActivateAnswer(ActivateStatus.ACTIVATED, store.time, work(record))
    lease = store.leases.get(command.lease_id)
    if record.state is not RequestState.PREFILLING or not _may_activate(store, lease, command):
        return ActivateAnswer(ActivateStatus.FENCED, store.time)
    have = len(record.tokens)
    if command.index > have:
        return ActivateAnswer(ActivateStatus.GAP, store.time)
    if command.index < have and record.tokens[command.index] != command.token:
        return ActivateAnswer(ActivateStatus.DIFFERENT, store.time)
    if command.index == have:
        logprobs = (command.logprobs,) if command.logprobs else ()
        append(store, record, (command.token,), logprobs, command.cached_tokens)
        cached = 0 if have else command.cached_tokens
        event = Event(record.uid, have, (command.token,), logprobs=logprobs, cached_tokens=cached)
        tell(store, record.watchers, event)
    if lease is not None:
        lease.state = step_lease(lease.state, LeaseState.ACTIVE)
    record.state = step_request(record.state, RequestState.DECODING)
    store.deadlines.pop(record.uid, None)
    store.disown(record.owner, f"c:{record.uid}")
    drop_suspect(store, record, record.owner)
    forget_pair(store, f"{record.owner}:{command.incarnation}")
    store.own(command.incarnation, f"c:{record.uid}")
    record.owner = command.incarnation
    record.timeline["committed"] = store.wall - command.committed_ago_ms
    record.timeline["activated"] = store.wall
    return ActivateAnswer(ActivateStatus.ACTIVATED, store.time, work(record))


def _may_activate(store: Store, lease: Lease | None, command: Activate) -> bool:
    if lease is None or lease.state is not LeaseState.RESERVED or lease.node != command.incarnation:
        return False
    return store.fresh(command.incarnation)
