"""Prefill and decode nodes that failed each other: the counterpart of ``avoid`` and others in _lib/nodes.lua."""

from __future__ import annotations

from app.ledger.memory.state import AVOID_DOUBLINGS, AVOID_MS, Record, Store


def avoid(store: Store, record: Record, decode: str) -> None:
    """Keep the owner of ``record`` and ``decode`` apart, and the record from both."""
    pair = f"{record.owner}:{decode}"
    times = store.avoided_times.get(pair, 0) + 1
    store.avoided_times[pair] = times
    till = store.time + AVOID_MS * 2 ** min(times - 1, AVOID_DOUBLINGS)
    store.avoided[pair] = till
    record.shunned, record.shunned_prefill, record.shunned_until = decode, record.owner, till


def forget_pair(store: Store, pair: str) -> None:
    store.avoided.pop(pair, None)
    store.avoided_times.pop(pair, None)


def forget_node(store: Store, incarnation: str) -> None:
    for pair in list(store.avoided):
        if incarnation in pair.split(":"):
            forget_pair(store, pair)


def left_to_others(store: Store, record: Record, decode: str, need: int) -> bool:
    """Whether this waiter and ``decode`` are kept apart, and another node could take the ``need`` blocks of it."""
    if not _apart(store, record, decode):
        return False
    others = (store.worker(inc, "decode") for inc in store.nodes if inc != decode and not _apart(store, record, inc))
    return any(other is not None and need <= other.info.num_blocks for other in others)


def left_to_other_prefill(store: Store, record: Record, prefill: str, need: int) -> bool:
    """Whether this queued request and ``prefill`` are kept apart, and another node could compute it."""
    if record.shunned_prefill != prefill or store.time > record.shunned_until:
        return False
    others = (store.worker(inc, "prefill") for inc in store.nodes if inc != prefill)
    return any(other.info.num_blocks >= need for other in others if other is not None)


def _apart(store: Store, record: Record, decode: str) -> bool:
    if record.shunned == decode and store.time <= record.shunned_until:
        return True
    return store.time <= store.avoided.get(f"{record.owner}:{decode}", -1)
