"""What must hold after every rule, read off the state itself: blocks, leases, records, streams.

``PROMISES`` are all of them. The simulation's checker follows each ledger command and each write to a KV block while it
happens; what stands here looks at what has come of them, and knows nothing of how.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.ledger.memory.state import Record, Store
from app.protocol.prefill.attempt import Attempt, Phase
from app.protocol.tables import BlockState, IllegalStep
from tests.sim.model import BLOCK_TOKENS, NOTHING_YET, kv_of
from tests.sim.process import State

if TYPE_CHECKING:
    from tests.model.cluster import Cluster
    from tests.sim.node import KVNode

_ENDS = frozenset({"FINISHED", "FAILED", "ABORTED", "EXPIRED"})
Problem = tuple[str, str]
"""What is wrong, and with which request."""

_MAY_HOLD = {
    "prefill": {BlockState.RUNNING, BlockState.HELD, BlockState.CACHED},
    "decode": {BlockState.RESERVED, BlockState.PULLING, BlockState.READY, BlockState.IN_STEP},
}


def blocks_by_state_sum_to_the_pool(cluster: Cluster) -> Iterator[Problem]:
    """Every block is free, cached or held by entries of its node's table, in a state of its role; the counts say so."""
    for node in cluster.world.nodes():
        pool, table = node.machine.pool, node.machine.table
        states = Counter(pool.owner_of(block)[1] for block in range(pool.num_blocks))
        counts = {name: count for name, count in pool.counts().items() if count and name != "total"}
        if counts != {state.lower(): count for state, count in states.items()}:
            yield f"{node.name} counts {counts}, its blocks are {dict(states)}", ""
        loose = states[BlockState.FREE] + states[BlockState.CACHED]
        if loose != pool.free:
            yield f"{node.name} has {pool.free} blocks to give and {loose} that nobody holds", ""
        if not set(states) <= _MAY_HOLD[node.role] | {BlockState.FREE}:
            yield f"{node.name} is a {node.role} node and its blocks are {dict(states)}", ""
        held = len({block for entry in table.values() for block in entry.blocks})
        if held + pool.free != pool.num_blocks:
            yield f"{node.name}: {held} blocks held + {pool.free} free != {pool.num_blocks}", ""
        try:
            node.machine.audit()
        except IllegalStep as error:
            yield f"{node.name}: {error}", ""


def no_block_is_in_two_leases(cluster: Cluster) -> Iterator[Problem]:
    """No block is in two entries of a table, but for what two prompts begin with; no request in two leases."""
    for node in cluster.world.nodes():
        yield from _held_twice(node)
    store = cluster.world.ledger.store
    taken: dict[str, str] = {}
    for lease_id in store.open_leases:
        lease = store.leases[lease_id]
        if lease.uid in taken:
            yield f"{lease.uid} is leased as {taken[lease.uid]} and as {lease_id}", lease.uid
        taken[lease.uid] = lease_id
        record = store.records[lease.uid]
        if (lease.attempt, lease.fence) != (record.attempt, record.fence):
            yield f"lease {lease_id} is of attempt {lease.attempt}, {lease.uid} is in {record.attempt}", lease.uid


def _held_twice(node: KVNode) -> Iterator[Problem]:
    pool = node.machine.pool
    holder: dict[int, tuple[str, object]] = {}
    for key, entry in node.machine.table.items():
        for place, block in enumerate(entry.blocks):
            other, content = holder.setdefault(block, (key, _begins(entry, place)))
            if other != key and (content is None or content != _begins(entry, place)):
                yield f"{node.name}: block {block} is held by {other} and by {key}", entry.uid
            if other != key and pool.owner_of(block)[1] is not BlockState.HELD:
                yield f"{node.name}: block {block} of {other} and {key} is {pool.owner_of(block)[1]}", entry.uid
            holders = pool.holders_of(block) if node.role == "prefill" else pool.owner_of(block)[:1]
            if key not in holders:
                yield f"{node.name}: block {block} of {key} is held by {holders}", entry.uid


def _begins(entry: object, place: int) -> object:
    """Everything up to the end of a full block of a prompt, and for whom; None where nobody may share."""
    if not isinstance(entry, Attempt):
        return None
    tokens, end = (*entry.work.prompt_ids, *entry.work.output_ids), (place + 1) * BLOCK_TOKENS
    return (entry.work.salt, tokens[:end]) if end <= len(tokens) else None


def pinned_kv_is_that_of_its_tokens(cluster: Cluster) -> Iterator[Problem]:
    """What a prefill node has computed, or found, for an attempt that it holds is still there: nobody wrote over it."""
    for node in cluster.world.nodes():
        for key, entry in node.machine.table.items():
            if not isinstance(entry, Attempt):
                continue
            tokens = (*entry.work.prompt_ids, *entry.work.output_ids)
            if entry.phase in (Phase.IN_LINE, Phase.COMPUTING):
                tokens = tokens[: entry.num_cached * BLOCK_TOKENS]
            before = NOTHING_YET
            for position, token in enumerate(tokens):
                before = kv_of(before, token)
                block = entry.blocks[position // BLOCK_TOKENS]
                if node.memory.blocks[block][position % BLOCK_TOKENS] != before:
                    yield f"{node.name}: position {position} of {key} is not its own any more", entry.uid
                    break


def nothing_of_an_old_fence_has_landed(cluster: Cluster) -> Iterator[Problem]:
    """The ledger says of each request what follows from the commands that it has accepted; so do its sets."""
    world, faults = cluster.world, cluster.faults
    if not _somebody_scans(cluster):
        faults.excuse(world.timeline.now)
    world.ledger.healthy_since = max(world.ledger.healthy_since, faults.excused_until)
    world.checker.audit()
    yield from ()


def _somebody_scans(cluster: Cluster) -> bool:
    """Whether there is a process through which the ledger can learn that another is dead."""
    world = cluster.world
    running = [world.current(name) for name in cluster.names(State.RUNNING, "p", "d", "w", "c")]
    return any(process.beats.registered and not world.cut_off(process.name) for process in running)  # type: ignore[attr-defined]


def tokens_are_those_of_the_uids_own_prompt(cluster: Cluster) -> Iterator[Problem]:
    """Tokens follow from the uid's own prompt, from index 0 on, without a gap; all of them once it is FINISHED."""
    for uid, record in cluster.world.ledger.store.records.items():
        wish = cluster.world.checker.wish_of(uid)
        if record.prompt_ids != wish.prompt:
            yield f"the prompt of {uid} is not what its client sent", uid
        tokens = tuple(record.tokens)
        if tokens != wish.answer[: len(tokens)]:
            yield f"{uid} holds {tokens}, its answer is {wish.answer}", uid
        if record.state == "FINISHED" and tokens != wish.answer:
            yield f"{uid} is FINISHED with {len(tokens)} of {len(wish.answer)} tokens", uid


def indexes_have_no_gap(cluster: Cluster) -> Iterator[Problem]:
    """A client has the tokens of its own wish from index 0 on, without a gap; all of them if it was told the end."""
    for stream in cluster.world.clients.streams:
        for wish, got in zip(stream.wish.choices, stream.tokens, strict=True):
            tokens = tuple(got)
            if tokens != wish.answer[: len(tokens)]:
                yield f"the client of {wish.client_id} got {tokens}, its answer is {wish.answer}", stream.uid
            if stream.outcome == "finished" and tokens != wish.answer:
                yield f"the client of {wish.client_id} was told the end after {len(tokens)} tokens", stream.uid


def one_terminal_event(cluster: Cluster) -> Iterator[Problem]:
    """On each web's stream a request has one terminal event, which is true, and nothing after it."""
    store = cluster.world.ledger.store
    for web, stream in store.events.items():
        ended: dict[str, str] = {}
        for _, event in stream:
            if event.uid in ended:
                yield f"{web} was sent {event} after the terminal event", event.uid
            if event.state in _ENDS:
                ended[event.uid] = event.state
        for uid, state in ended.items():
            if uid in store.records and store.records[uid].state != state:
                yield f"{web} was sent that {uid} is {state}, it is {store.records[uid].state}", uid


@dataclass(slots=True)
class Past:
    """What the records said after the rules before. A ledger that goes back to its last fsync goes back in this too."""

    store: Store | None = None
    attempts: dict[str, int] = field(default_factory=dict)
    fences: defaultdict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    ends: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def of(self, store: Store) -> Past:
        """The past of this store: a server that went back has another one."""
        if store is not self.store:
            self.store = store
            for said in (self.attempts, self.fences, self.ends):
                said.clear()
        return self


def what_is_over_stays_over(cluster: Cluster) -> Iterator[Problem]:
    """No attempt comes back, no fence is used for two of them, an end is final."""
    store = cluster.world.ledger.store
    past = cluster.past.of(store)
    for uid, record in store.records.items():
        if record.attempt < past.attempts.get(uid, 0):
            yield f"{uid} went back from attempt {past.attempts[uid]} to {record.attempt}", uid
        past.attempts[uid] = record.attempt
        if record.fence and past.fences[uid].setdefault(record.fence, record.attempt) != record.attempt:
            yield f"{uid} has the fence of attempt {past.fences[uid][record.fence]} again", uid
        if record.state in _ENDS:
            past.ends.setdefault(uid, _end(record))
        if uid in past.ends and past.ends[uid] != _end(record):
            yield f"{uid} had ended as {past.ends[uid]}, and says {_end(record)} now", uid


def _end(record: Record) -> tuple[object, ...]:
    return str(record.state), record.attempt, tuple(record.tokens), record.finish_reason, record.error_code


PROMISES: tuple[Callable[[Cluster], Iterator[Problem]], ...] = (
    blocks_by_state_sum_to_the_pool,
    no_block_is_in_two_leases,
    pinned_kv_is_that_of_its_tokens,
    nothing_of_an_old_fence_has_landed,
    tokens_are_those_of_the_uids_own_prompt,
    indexes_have_no_gap,
    one_terminal_event,
    what_is_over_stays_over,
)
