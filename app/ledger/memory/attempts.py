"""What a node asks about one attempt that it has: claim, stamp, emit, fail_attempt."""

from __future__ import annotations

from app.ledger.memory.ends import end_attempt, end_request
from app.ledger.memory.lines import Pick, blocks, walk
from app.ledger.memory.pairs import avoid, left_to_other_prefill
from app.ledger.memory.records import append, hold_suspect, tell, work
from app.ledger.memory.state import PASSED_OVER_MS, Node, Record, Store
from app.protocol.commands import (
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
    Stamp,
    StampAnswer,
    StampStatus,
)
from app.protocol.tables import LeaseState, RequestState, step_request


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
    uid = walk(store.queue, node, _claim_picker(store, command, node))
    if uid is None:
        return ClaimAnswer(ClaimStatus.NOTHING, store.time, queue_empty=not store.queue)
    record = store.records[uid]
    record.state = step_request(record.state, RequestState.PREFILLING)
    record.fence, record.owner, record.lease = command.fence, command.incarnation, ""
    record.waited += store.time - record.queued_at
    record.claimed_at = store.time
    record.stamped = command.stamp
    hold_suspect(store, record, command.incarnation)
    record.prefill_node, record.decode_node = node.info.name, ""
    record.timeline["claimed"] = store.wall
    store.fences[command.fence] = uid
    del store.queue[uid]
    store.rings.pop(uid, None)
    store.deadlines[uid] = store.time + record.limits.first_token_timeout_ms
    store.own(command.incarnation, f"c:{uid}")
    if record.sampling.max_tokens - len(record.tokens) > 1:
        store.waiters[uid] = record.seq
    return ClaimAnswer(ClaimStatus.CLAIMED, store.time, work(record))


def _owner(record: Record) -> tuple[str, str]:
    return record.fence, record.owner


def _claim_picker(store: Store, command: Claim, node: Node) -> Pick:
    def fits(record: Record) -> bool:
        return blocks(record.total, command.block_size_tokens) <= command.free_blocks

    def waited_long(record: Record) -> bool:
        return store.time - record.queued_at > PASSED_OVER_MS

    hinted = _candidate(store, command, node, command.hint_uid)
    if hinted is not None and not fits(hinted):
        hinted = None

    head = True

    def pick(uids: list[str]) -> tuple[str | None, bool]:
        nonlocal head
        first: str | None = None
        for uid in uids:
            record = _candidate(store, command, node, uid)
            if record is None:
                continue
            if hinted is not None and record.seq >= hinted.seq:
                break
            if fits(record):
                first = first or uid
                if hinted is None or waited_long(record):
                    return first, False
            elif head and waited_long(record):
                return None, True
            head = False
        return (hinted.uid if hinted else None), False

    return pick


def _candidate(store: Store, command: Claim, node: Node, uid: str) -> Record | None:
    """A queued request that this node may take, now or once it has blocks."""
    record = store.records.get(uid)
    if record is None or record.state is not RequestState.QUEUED or (record.suspect and node.suspect):
        return None
    need = blocks(record.total, command.block_size_tokens)
    if need > max(node.info.num_blocks, command.free_blocks):
        return None
    return None if left_to_other_prefill(store, record, command.incarnation, need) else record


def stamp(store: Store, command: Stamp) -> StampAnswer:
    record = store.records.get(command.uid)
    named = (RequestState.PREFILLING, command.attempt, command.fence, command.incarnation)
    if record is None or (record.state, record.attempt, record.fence, record.owner) != named:
        return StampAnswer(StampStatus.FENCED, store.time)
    record.stamped = command.in_step
    return StampAnswer(StampStatus.OK, store.time)


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
    if record.state is RequestState.PREFILLING:
        record.stamped = False  # the step that computed this is over
    new, logprobs = command.tokens[have - command.index :], command.logprobs[have - command.index :]
    if not new and not command.finish_reason:
        return says(EmitStatus.SAME)
    if new:
        append(store, record, new, logprobs, command.cached_tokens)
    if command.finish_reason:
        finish = command.finish_reason
        end_request(store, record, RequestState.FINISHED, finish_reason=finish, tokens=new, logprobs=logprobs)
    else:
        cached = 0 if have else command.cached_tokens
        tell(store, record.watchers, Event(record.uid, have, new, logprobs=logprobs, cached_tokens=cached))
        _resize(store, record, command.blocks)
    return says(EmitStatus.OK)


def _resize(store: Store, record: Record, blocks: int) -> None:
    """The decode node has given the lease more blocks; 0: it has not."""
    lease = store.leases.get(record.lease)
    if blocks and lease is not None:
        lease.blocks = blocks


def _ended_so(record: Record, command: Emit, stop: int) -> bool:
    """Whether ``command`` is (part of) what finished this record."""
    if record.state is not RequestState.FINISHED or stop > len(record.tokens):
        return False
    return not command.finish_reason or (command.finish_reason == record.finish_reason and stop == len(record.tokens))


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
    lease = store.leases.get(record.lease)
    if command.avoid_pair and record.state is RequestState.PREFILLING and lease is not None:
        avoid(store, record, lease.node)
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
