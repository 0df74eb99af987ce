"""Whether the ledger's sets and records say the same: a second reading of what the keys mean."""

from __future__ import annotations

from collections.abc import Iterator

from app.ledger.memory.state import Record, Store

Problem = tuple[str, str]
"""What is wrong, and with which request."""


def check_store(store: Store) -> Problem | None:
    """The first thing that is wrong, or None."""
    for check in (_records, _owned, _leases, _guards, _groups):
        for problem in check(store):
            return problem
    return None


def _records(store: Store) -> Iterator[Problem]:
    """Each record stands in the sets of its state, and only there."""
    for uid, record in store.records.items():
        state = record.state
        left = record.sampling.max_tokens - len(record.tokens)
        waits = state == "PREFILLING" and not record.lease and left > 1
        must = {
            "queue": state == "QUEUED",
            "rings": state == "QUEUED",
            "deadlines": state in ("QUEUED", "PREFILLING"),
            "waiters": waits,
        }
        if state == "PREFILLING" and left == 1:
            del must["waiters"]  # whether one or two were left when it was claimed, the record does not say
        for name, there in must.items():
            if (uid in getattr(store, name)) != there:
                yield f"{uid} is {state} and {'not ' if there else ''}in {name}", uid
        if state in ("PREFILLING", "DECODING") and not (record.fence and record.owner):
            yield f"{uid} is {state} without an owner or fence", uid
    for name in ("queue", "rings", "deadlines", "waiters"):
        for uid in getattr(store, name).keys() - store.records.keys():
            yield f"{uid} is in {name} without a record", uid


def _owned(store: Store) -> Iterator[Problem]:
    """``owned`` lists exactly the claims, leases and watchers that the records name."""
    must: dict[str, set[str]] = {}
    for uid, record in store.records.items():
        if record.computing:
            must.setdefault(record.owner, set()).add(f"c:{uid}")
            if record.lease:
                must.setdefault(store.leases[record.lease].node, set()).add(f"l:{record.lease}")
        for watcher in record.watchers:
            must.setdefault(watcher.web, set()).add(f"w:{uid}:{watcher.connection}")
    for incarnation in must.keys() | store.owned.keys():
        there, wanted = set(store.owned.get(incarnation, ())), must.get(incarnation, set())
        for member in there ^ wanted:
            yield f"owned of {incarnation}: {member} is {'missing' if member in wanted else 'too much'}", ""
        if incarnation not in store.nodes:
            yield f"{incarnation} owns {sorted(there)} and is not registered", ""


def _leases(store: Store) -> Iterator[Problem]:
    """An open lease is that of its attempt; a closed one is nobody's."""
    for lease_id, lease in store.leases.items():
        is_open = lease.state in ("RESERVED", "ACTIVE")
        if is_open != (lease_id in store.open_leases):
            yield f"lease {lease_id} is {lease.state} and open_leases says otherwise", lease.uid
        record = store.records.get(lease.uid)
        if is_open and not (record is not None and _holds(record, lease_id, lease.state)):
            yield f"lease {lease_id} is {lease.state} for {record}", lease.uid
    for lease_id in store.open_leases.keys() - store.leases.keys():
        yield f"open lease {lease_id} does not exist", ""


def _holds(record: Record, lease_id: str, state: str) -> bool:
    return record.lease == lease_id and record.state == ("PREFILLING" if state == "RESERVED" else "DECODING")


def _guards(store: Store) -> Iterator[Problem]:
    """A client id is taken while a request with it is in process, which is watched or in its grace."""
    for uid, record in store.records.items():
        if record.in_process:
            if store.guards.get(record.client_id) != (record.group or uid):
                yield f"{uid} is {record.state} without its guard", uid
            if bool(record.watchers) == (uid in store.unwatched):
                yield f"{uid} is {record.state}, its watchers are {record.watchers}, unwatched {store.unwatched}", uid
    for client_id, uid in store.guards.items():
        holder = store.records.get(uid)
        if holder is None or not _keeps_its_id([each for each in store.records.values() if _of(each) == uid]):
            yield f"client id {client_id} is taken by {uid}, which has ended", uid


def _of(record: Record) -> str:
    return record.group or record.uid


def _keeps_its_id(group: list[Record]) -> bool:
    finished = all(each.state == "FINISHED" for each in group)
    return any(each.in_process for each in group) or (finished and group[0].limits.dedup_window_ms > 0)


def _groups(store: Store) -> Iterator[Problem]:
    """The sequences of a request are there together, and none goes on when another has ended badly."""
    groups: dict[str, list[Record]] = {}
    for record in store.records.values():
        if record.group:
            groups.setdefault(record.group, []).append(record)
    for uid, group in groups.items():
        first = store.records.get(uid)
        if first is None or first.choices != len(group):
            yield f"the group {uid} has {len(group)} records: {first}", uid
            continue
        running = sum(each.in_process for each in group)
        if first.left != running:
            yield f"{first.left} of the group {uid} are said to be in process, {running} are", uid
        ends = {each.state for each in group if not each.in_process}
        if ends - {"FINISHED"} and running:
            yield f"{running} of the group {uid} go on, though others ended as {sorted(ends)}", uid
        if len(ends - {"FINISHED"}) > 1:
            yield f"the group {uid} has several ends: {sorted(ends)}", uid
