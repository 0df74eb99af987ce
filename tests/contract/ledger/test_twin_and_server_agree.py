"""Generated command sequences: both ledgers give the same answers and keep the same data, only along legal steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.protocol.commands import AdmitAnswer, AttachAnswer, Cluster, Holdings, SnapshotAnswer
from app.protocol.tables import IN_PROCESS, LEASE_STEPS, REQUEST_STEPS, LeaseState, RequestState
from tests.contract.ledger.generated import NODES, Sequence, plan_of, told
from tests.contract.ledger.support import Dump, World

OPEN = (LeaseState.RESERVED, LeaseState.ACTIVE)


def normal(answer: Any) -> Any:
    """Without the server's wall clock and life."""
    if isinstance(answer, SnapshotAnswer):
        return replace(answer, timeline=dict.fromkeys(answer.timeline, 0))
    if isinstance(answer, AdmitAnswer):
        return replace(answer, admitted_wall_ms=min(answer.admitted_wall_ms, 1))
    if isinstance(answer, AttachAnswer):
        return replace(answer, record=answer.record and normal(answer.record))
    return replace(answer, run_id="") if hasattr(answer, "run_id") else answer


def check_consistent(dump: Dump) -> None:
    """What must hold between records, lines, guards, leases and holdings after every single step."""
    records = dump["records"]
    running = {uid: r for uid, r in records.items() if r["state"] in IN_PROCESS}
    for r in records.values():
        assert r["logprobs"] == list(told(r, *r["tokens"]))
    queued = {uid for uid, r in running.items() if r["state"] == "QUEUED"}
    prefilling = {uid for uid, r in running.items() if r["state"] == "PREFILLING"}
    assert set(dump["queue"]) == set(dump["rings"]) == queued
    assert set(dump["deadlines"]) == queued | prefilling
    assert set(dump["waiters"]) <= {uid for uid in prefilling if not records[uid]["lease"]}
    for uid, r in running.items():
        mates = [each for each in records.values() if r["group"] and each["group"] == r["group"]]
        assert all(each["state"] in (*IN_PROCESS, "FINISHED") for each in mates), f"{uid} goes on alone"
    of = {uid: r["group"] or uid for uid, r in records.items()}
    gone_wrong = {of[uid] for uid, r in records.items() if r["state"] not in (*IN_PROCESS, "FINISHED")}
    holds_guard = {
        of[uid] for uid, r in records.items() if uid in running or (r["dedup_window"] and of[uid] not in gone_wrong)
    }
    for uid, r in records.items():
        if "left" in r:
            assert r["left"] == sum(of[each] == uid for each in running)
    assert dump["guards"] == {records[uid]["client"]: uid for uid in holds_guard}
    assert len(dump["guards"]) == len(holds_guard)
    watched = {uid for uid, r in records.items() if r["watchers"]}
    assert watched.isdisjoint(dump["unwatched"])
    assert watched | set(dump["unwatched"]) == set(running)
    assert all(records[uid]["key"].startswith(f"{key}/") for key, uid in dump["keys"].items())
    held = {key: lease for key, lease in dump["leases"].items() if lease["state"] in OPEN}
    assert set(held) == set(dump["open_leases"])
    assert {lease["uid"]: key for key, lease in held.items()} == {
        uid: r["lease"] for uid, r in running.items() if r["lease"]
    }
    expected: dict[str, set[str]] = {}
    for uid, r in running.items():
        for watcher in r["watchers"]:
            web, _, connection = watcher.partition(":")
            expected.setdefault(web, set()).add(f"w:{uid}:{connection}")
        if uid not in queued:
            expected.setdefault(r["owner"], set()).add(f"c:{uid}")
    for key, lease in held.items():
        expected.setdefault(lease["node"], set()).add(f"l:{key}")
    assert {inc: set(members) for inc, members in dump["owned"].items()} == expected
    check_suspects_and_pairs(dump, running, held)
    assert set(dump["owned"]) <= set(dump["nodes"]) == set(dump["fresh"])


def check_suspects_and_pairs(dump: Dump, running: Dump, held: Dump) -> None:
    """A suspect is noted at each node that holds it, no node holds two; failed pairs are of nodes that are there."""
    suspects = {uid: r for uid, r in running.items() if r["suspect"]}
    at = {(r["owner"], uid) for uid, r in suspects.items() if r["state"] != "QUEUED"}
    at |= {(lease["node"], lease["uid"]) for lease in held.values() if lease["uid"] in suspects}
    assert at == set(dump["suspects"].items())
    assert all(r["suspect"] > len(r["tokens"]) for r in suspects.values())
    assert set(dump["avoided"]) == set(dump["avoided_times"])
    assert {inc for pair in dump["avoided"] for inc in pair.split(":")} <= set(dump["nodes"])


def check_steps(before: Dump, after: Dump) -> None:
    """Every change of state is in the tables; tokens are only added; only a requeue raises ``attempt``."""
    for uid, new in after["records"].items():
        old = before["records"].get(uid)
        if old is None:
            assert new["state"] == "QUEUED"
            continue
        # One scan may requeue a request and then end it (its deadline and its web process are both gone).
        path = [old["state"], new["state"]]
        if new["attempt"] == old["attempt"] + 1:
            path.insert(1, "QUEUED")
        else:
            assert new["attempt"] == old["attempt"]
            assert old["state"] == "QUEUED" or new["state"] != "QUEUED"
        for one, other in pairwise(path):
            assert one == other or other in REQUEST_STEPS[RequestState(one)], f"{uid}: {old} -> {new}"
        assert new["tokens"][: len(old["tokens"])] == old["tokens"]
    for key, new in after["leases"].items():
        old_state = before["leases"].get(key, {"state": new["state"]})["state"]
        assert new["state"] == old_state or new["state"] in LEASE_STEPS[LeaseState(old_state)], key
    assert set(before["records"]) <= set(after["records"])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), length=st.integers(80, 120))
def test_they_agree(make_worlds: Callable[[], tuple[World, World]], seed: int, length: int) -> None:
    twin, real = make_worlds()
    sequence = Sequence()
    try:
        for inc, role in NODES.items():
            assert normal(twin.node(inc, role, ttl=8_000, num_blocks=5)) == normal(
                real.node(inc, role, ttl=8_000, num_blocks=5)
            )
        before = twin.dump()
        for choice in plan_of(seed, length):
            if choice.command == "advance":
                for each in (twin, real):
                    each.advance(95_000 if choice.b % 30 == 0 else (100, 900, 2_500)[choice.a % 3])
                continue
            command = sequence.build(choice, before)
            assert normal(twin.do(command)) == normal(real.do(command)), command
            after = real.dump()
            assert twin.dump() == after, command
            check_consistent(after)
            check_steps(before, after)
            before = after
        for uid in before["records"]:
            assert normal(twin.read(uid)) == normal(real.read(uid))
        for inc in before["nodes"]:
            assert twin.do(Holdings(inc)) == real.do(Holdings(inc))
            assert twin.events(inc) == real.events(inc)
        assert twin.do(Cluster()) == real.do(Cluster())
    finally:
        twin.close()
        real.close()
