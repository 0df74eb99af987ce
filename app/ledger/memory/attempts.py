"""What prefill and decode nodes ask: claim, reserve_next, activate, emit, fail_attempt."""

from __future__ import annotations

from collections.abc import Callable

from app.ledger.memory.ends import append, end_attempt, end_request, tell
from app.ledger.memory.state import CLOSED_TTL_MS, PASSED_OVER_MS, WALK, Lease, Node, Record, Scores, Store, ranked
from app.protocol.commands import (
    Activate,
    ActivateAnswer,
    ActivateStatus,
    Claim,
    ClaimAnswer,
    ClaimStatus,
    Emit,
    EmitAnswer,
    EmitStatus,
    Event,
    FailAnswer,
    FailAttempt,
    FailStatus,
    ReserveAnswer,
    ReserveNext,
    ReserveStatus,
    Work,
)
from app.protocol.tables import LeaseState, RequestState, step_lease, step_request


def work(record: Record) -> Work:
    return Work(
        record.uid,
        record.client_id,
        record.attempt,
        record.fence,
        record.prompt_ids,
        tuple(record.tokens),
        record.sampling,
    )


def blocks(tokens: int, block_size_tokens: int) -> int:
    return -(-tokens // block_size_tokens)


Pick = Callable[[list[str]], tuple[str | None, bool]]


def walk(scores: Scores, node: Node, pick: Pick) -> str | None:
    """The head of a line, and if ``pick`` takes none of it, a part further back: see ``walk`` in _lib.lua."""
    line = ranked(scores)
    head = line[:WALK]
    last = scores[head[-1]] if head else 0
    uid, stop = pick(head)
    if uid or stop or len(head) < WALK:
        return uid
    start = max(last, node.cursor)
    rest = [each for each in line[WALK:] if scores[each] > start][:WALK]
    last = scores[rest[-1]] if rest else 0
    uid, stop = pick(rest)
    if not uid and not stop:
        node.cursor = last if len(rest) == WALK else -1
    return uid


def claim(store: Store, command: Claim) -> ClaimAnswer:
    claimed = store.fences.get(command.fence)
    if claimed is not None:
        record = store.records.get(claimed)
        if (
            record
            and record.state is RequestState.PREFILLING
            and _owner(record) == (command.fence, command.incarnation)
        ):
            return ClaimAnswer(ClaimStatus.CLAIMED, store.time, work(record))
        return ClaimAnswer(ClaimStatus.NOTHING, store.time)
    node = store.worker(command.incarnation, "prefill")
    if node is None:
        return ClaimAnswer(ClaimStatus.REFUSED, store.time)
    uid = walk(store.queue, node, _claim_picker(store, command))
    if uid is None:
        return ClaimAnswer(ClaimStatus.NOTHING, store.time)
    record = store.records[uid]
    record.state = step_request(record.state, RequestState.PREFILLING)
    record.fence, record.owner, record.lease = command.fence, command.incarnation, ""
    record.waited += store.time - record.queued_at
    record.claimed_at = store.time
    record.prefill_node, record.decode_node = node.info.name, ""
    record.timeline["claimed"] = store.wall
    store.fences[command.fence] = uid
    store.expire(CLOSED_TTL_MS, "fence", command.fence)
    del store.queue[uid]
    store.rings.pop(uid, None)
    store.deadlines[uid] = store.time + record.limits.first_token_timeout_ms
    store.own(command.incarnation, f"c:{uid}")
    if record.sampling.max_tokens - len(record.tokens) > 1:
        store.waiters[uid] = record.seq
    return ClaimAnswer(ClaimStatus.CLAIMED, store.time, work(record))


def _owner(record: Record) -> tuple[str, str]:
    return record.fence, record.owner


def _claim_picker(store: Store, command: Claim) -> Pick:
    def candidate(uid: str) -> Record | None:
        record = store.records.get(uid)
        if record is None or record.state is not RequestState.QUEUED:
            return None
        return record if blocks(record.total, command.block_size_tokens) <= command.free_blocks else None

    hinted = candidate(command.hint_uid)

    def pick(uids: list[str]) -> tuple[str | None, bool]:
        first: str | None = None
        for record in filter(None, map(candidate, uids)):
            if hinted is not None and record.seq >= hinted.seq:
                break
            first = first or record.uid
            if hinted is None or store.time - record.queued_at > PASSED_OVER_MS:
                return first, False
        return (hinted.uid if hinted else None), False

    return pick


def fail_attempt(store: Store, command: FailAttempt) -> FailAnswer:
    record = store.records.get(command.uid)
    if record is None:
        return FailAnswer(FailStatus.FENCED, store.time)
    by = (command.fence, command.incarnation)
    ended_here = record.state is RequestState.FAILED and record.attempt == command.attempt
    if record.failed_by == by and (record.attempt == command.attempt + 1 or ended_here):
        return FailAnswer(FailStatus(record.failed_as), store.time, record.attempt)
    if not _may_fail(store, record, command):
        return FailAnswer(FailStatus.FENCED, store.time)
    status = end_attempt(store, record, command.kind, command.reason, command.detail)
    record.failed_by, record.failed_as = by, status
    return FailAnswer(status, store.time, record.attempt)


def _may_fail(store: Store, record: Record, command: FailAttempt) -> bool:
    if not record.computing or (record.attempt, record.fence) != (command.attempt, command.fence):
        return False
    if not command.lease_id:
        return record.owner == command.incarnation
    lease = store.leases.get(command.lease_id)
    if record.lease != command.lease_id or lease is None or lease.node != command.incarnation:
        return False
    return lease.state in (LeaseState.RESERVED, LeaseState.ACTIVE)


def reserve_next(store: Store, command: ReserveNext) -> ReserveAnswer:
    held = store.leases.get(command.lease_id)
    if held is not None:
        owner = store.records.get(held.uid)
        if owner and held.state is LeaseState.RESERVED and held.node == command.incarnation:
            return _reserved(store, owner, held.blocks)
        return ReserveAnswer(ReserveStatus.NOTHING, store.time)
    node = store.worker(command.incarnation, "decode")
    if node is None:
        return ReserveAnswer(ReserveStatus.REFUSED, store.time)
    uid = walk(store.waiters, node, _reserve_picker(store, command, node))
    if uid is None:
        return ReserveAnswer(ReserveStatus.NOTHING, store.time)
    record = store.records[uid]
    need = _lease_blocks(record, command)
    store.leases[command.lease_id] = Lease(uid, record.attempt, record.fence, command.incarnation, need, at=store.time)
    store.open_leases[command.lease_id] = store.time
    store.own(command.incarnation, f"l:{command.lease_id}")
    del store.waiters[uid]
    record.lease, record.decode_node = command.lease_id, node.info.name
    record.timeline["granted"] = store.wall
    return _reserved(store, record, need)


def _lease_blocks(record: Record, command: ReserveNext) -> int:
    return blocks(len(record.prompt_ids) + record.sampling.max_tokens, command.block_size_tokens)


def _reserved(store: Store, record: Record, held: int) -> ReserveAnswer:
    prefill = store.nodes.get(record.owner)
    return ReserveAnswer(
        ReserveStatus.RESERVED,
        store.time,
        record.uid,
        record.client_id,
        record.attempt,
        record.fence,
        held,
        record.owner,
        prefill.info.address if prefill else "",
    )


def _reserve_picker(store: Store, command: ReserveNext, node: Node) -> Pick:
    def waiting(uid: str) -> Record | None:
        record = store.records.get(uid)
        if record is None or record.state is not RequestState.PREFILLING or record.lease:
            return None
        return record

    def fits(record: Record, free: int) -> bool:
        return _lease_blocks(record, command) <= free

    hinted = waiting(command.hint_uid) if command.hint_uid in store.waiters else None
    hint = hinted.uid if hinted and fits(hinted, command.free_blocks) else None

    def pick(uids: list[str]) -> tuple[str | None, bool]:
        head = True
        for uid in uids:
            record = waiting(uid)
            if record is None:
                del store.waiters[uid]
                continue
            if not fits(record, max(node.info.num_blocks, command.free_blocks)):
                continue
            now_fits = fits(record, command.free_blocks)
            if head and store.time - record.claimed_at >= PASSED_OVER_MS:
                return (uid, False) if now_fits else (None, True)
            head = False
            if now_fits:
                return hint or uid, False
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
        append(store, record, (command.token,))
        tell(store, record.watchers, Event(record.uid, have, (command.token,)))
    if lease is not None:
        lease.state = step_lease(lease.state, LeaseState.ACTIVE)
    record.state = step_request(record.state, RequestState.DECODING)
    store.deadlines.pop(record.uid, None)
    store.disown(record.owner, f"c:{record.uid}")
    store.own(command.incarnation, f"c:{record.uid}")
    record.owner = command.incarnation
    record.timeline["committed"] = store.wall - command.committed_ago_ms
    record.timeline["activated"] = store.wall
    return ActivateAnswer(ActivateStatus.ACTIVATED, store.time, work(record))


def _may_activate(store: Store, lease: Lease | None, command: Activate) -> bool:
    if lease is None or lease.state is not LeaseState.RESERVED or lease.node != command.incarnation:
        return False
    return store.fresh(command.incarnation)


def emit(store: Store, command: Emit) -> EmitAnswer:
    record = store.records.get(command.uid)
    if record is None:
        return EmitAnswer(EmitStatus.FENCED, store.time)
    have, stop = len(record.tokens), command.index + len(command.tokens)

    def says(status: EmitStatus) -> EmitAnswer:
        return EmitAnswer(status, store.time, len(record.tokens))

    if record.state is RequestState.ABORTED:
        return says(EmitStatus.ABORTED)
    named = (command.attempt, command.fence, command.incarnation)
    if (record.attempt, record.fence, record.owner) != named:
        return says(EmitStatus.FENCED)
    there = record.tokens[command.index : min(have, stop)]
    same = list(command.tokens[: len(there)]) == there
    if not record.computing:
        return says(EmitStatus.SAME if same and _ended_so(record, command, stop) else EmitStatus.FENCED)
    if command.index > have:
        return says(EmitStatus.GAP)
    if not same or (command.finish_reason and stop < have):
        return says(EmitStatus.DIFFERENT)
    new = command.tokens[have - command.index :]
    if not new and not command.finish_reason:
        return says(EmitStatus.SAME)
    if new:
        append(store, record, new)
    if command.finish_reason:
        end_request(store, record, RequestState.FINISHED, finish_reason=command.finish_reason, tokens=new)
    else:
        tell(store, record.watchers, Event(record.uid, have, new))
    return says(EmitStatus.OK)


def _ended_so(record: Record, command: Emit, stop: int) -> bool:
    """Whether ``command`` is (part of) what finished this record."""
    if record.state is not RequestState.FINISHED or stop > len(record.tokens):
        return False
    return not command.finish_reason or (command.finish_reason == record.finish_reason and stop == len(record.tokens))
