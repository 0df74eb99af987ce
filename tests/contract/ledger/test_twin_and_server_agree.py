"""Generated command sequences: both ledgers give the same answers and keep the same data, only along legal steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.protocol.commands import (
    Abort,
    Activate,
    Admit,
    Claim,
    Cluster,
    Deregister,
    Detach,
    Drain,
    Emit,
    FailAttempt,
    FailureKind,
    Heartbeat,
    Holdings,
    Limits,
    Register,
    ReportExit,
    ReserveNext,
    Scan,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)
from app.protocol.tables import IN_PROCESS, LEASE_STEPS, REQUEST_STEPS, LeaseState, RequestState
from app.schemas import FinishReason, Gauges, NodeInfo, SamplingParams

NODES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "w0": "web", "w1": "web"}
BY_ROLE = {role: [inc for inc, its in NODES.items() if its == role] for role in ("prefill", "decode", "web")}
OPEN = (LeaseState.RESERVED, LeaseState.ACTIVE)
WEIGHTS = {
    "admit": 5,
    "claim": 8,
    "reserve": 8,
    "activate": 8,
    "emit": 12,
    "fail": 3,
    "abort": 1,
    "detach": 1,
    "scan": 5,
    "advance": 4,
    "heartbeat": 8,
    "register": 6,
    "exit": 1,
    "drain": 1,
    "deregister": 1,
    "look": 1,
}


@dataclass(frozen=True)
class Choice:
    """One generated step; what the numbers choose depends on the state it meets."""

    command: str
    a: int
    b: int
    wrong: int
    """Below 8 in 10 the command names what is true; above, one detail is false."""


def plan_of(seed: int, length: int) -> list[Choice]:
    """The same choices for the same seed; a shorter plan is the beginning of a longer one, so that failures shrink."""
    drawn = random.Random(seed)
    names = list(WEIGHTS)
    weights = list(WEIGHTS.values())
    return [
        Choice(drawn.choices(names, weights)[0], drawn.randrange(840), drawn.randrange(840), drawn.randrange(10))
        for _ in range(length)
    ]


class Sequence:
    """Turns choices into commands that reach deep: most name the present fence, lease and index of a record."""

    def __init__(self) -> None:
        self.admissions = 0
        self.fences = 0
        self.leases = 0

    def build(self, choice: Choice, dump: dict[str, Any]) -> Any:
        return getattr(self, choice.command)(choice, dump)

    def any_uid(self, choice: Choice) -> str:
        return f"u{self.admissions + (choice.wrong == 9) - choice.b % 4}"

    def admit(self, choice: Choice, _: Any) -> Any:
        self.admissions += choice.wrong < 9
        limits = Limits(1 + choice.a % 3, 4, 3_000, 6_000, 10_000_000)
        prompt = tuple(range(1 + choice.b % 60))
        sampling = SamplingParams(seed=-(2**63) + choice.a, max_tokens=1 + choice.b % 9)
        web = BY_ROLE["web"][choice.b % 2]
        return Admit(f"u{self.admissions}", f"client{choice.a % 5}", prompt, sampling, Watcher(web, "x"), limits)

    def claim(self, choice: Choice, _: Any) -> Any:
        self.fences += choice.wrong < 8
        node = BY_ROLE["prefill"][choice.a % 2] if choice.wrong < 9 else "d0"
        return Claim(self.any_uid(choice) if choice.a % 3 else "", node, f"f{self.fences}", 1 + choice.b % 7, 16)

    def reserve(self, choice: Choice, _: Any) -> Any:
        self.leases += choice.wrong < 8
        node = BY_ROLE["decode"][choice.a % 2]
        return ReserveNext(self.any_uid(choice) if choice.a % 3 else "", node, f"l{self.leases}", 1 + choice.b % 7, 16)

    def _record(self, choice: Choice, dump: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        nothing = {"attempt": 1, "fence": "f0", "owner": "p0", "lease": "l0", "tokens": [], "watchers": []}
        records = sorted(dump["records"].items())
        computing = [pair for pair in records if pair[1]["state"] in ("PREFILLING", "DECODING")]
        chosen = computing if computing and choice.a % 8 else records
        return chosen[choice.a % len(chosen)] if chosen else ("u9", nothing)

    def emit(self, choice: Choice, dump: dict[str, Any]) -> Any:
        uid, record = self._record(choice, dump)
        index, n = len(record["tokens"]), 1 + choice.b % 3
        index = max(0, index - choice.a % 3) if choice.wrong == 5 else index + (choice.wrong == 6)
        tokens = tuple(100 + index + i for i in range(n))
        fence = "f-none" if choice.wrong == 7 else record["fence"]
        tokens = tuple(token + 1 for token in tokens) if choice.wrong == 8 else tokens
        owner = "d1" if choice.wrong == 9 else record["owner"]
        reason: FinishReason | None = "stop" if choice.b % 7 == 0 else None
        return Emit(uid, record["attempt"], fence, owner, index, tokens, reason)

    def activate(self, choice: Choice, dump: dict[str, Any]) -> Any:
        uid, record = self._record(choice, dump)
        lease, have = record["lease"], len(record["tokens"])
        node = dump["leases"].get(lease, {"node": "d0"})["node"]
        index = max(0, have - choice.b % 2) + (choice.wrong == 8)
        return Activate(uid, record["attempt"], record["fence"], lease, node, index, 100 + index + (choice.wrong == 9))

    def fail(self, choice: Choice, dump: dict[str, Any]) -> Any:
        uid, record = self._record(choice, dump)
        kind = (*[FailureKind.FAILURE] * 3, FailureKind.OVERLOAD, FailureKind.FINAL)[choice.b % 5]
        lease = record["lease"] if choice.b % 2 else ""
        node = dump["leases"].get(lease, {"node": record["owner"]})["node"]
        attempt = record["attempt"] - (choice.wrong == 9)
        return FailAttempt(uid, attempt, record["fence"], node, lease, kind, "engine_error", "detail")

    def abort(self, choice: Choice, _: Any) -> Any:
        return Abort(self.any_uid(choice), "user")

    def detach(self, choice: Choice, _: Any) -> Any:
        return Detach(self.any_uid(choice), Watcher(BY_ROLE["web"][choice.a % 2], "x"))

    def scan(self, choice: Choice, _: Any) -> Any:
        return Scan((0, 0, 500)[choice.a % 3])

    def heartbeat(self, choice: Choice, _: Any) -> Any:
        return Heartbeat(list(NODES)[choice.a % 6], Gauges(blocks={"free": choice.b}))

    def register(self, choice: Choice, _: Any) -> Any:
        inc = list(NODES)[choice.a % 6]
        layout = "" if NODES[inc] == "web" else "layout-2" if choice.wrong == 9 else "layout-1"
        info = NodeInfo(
            incarnation=inc,
            role=NODES[inc],
            name=f"{inc}@h",
            pid=1,
            host="h",
            address=inc,
            model="model-2" if choice.wrong == 8 else "model-1",
            layout=layout,
            num_blocks=3 + choice.b % 3,
            block_size_tokens=16,
        )
        return Register(info, 8_000)

    def exit(self, choice: Choice, _: Any) -> Any:
        return ReportExit(("p1", "d1", "w1")[choice.a % 3])

    def drain(self, choice: Choice, _: Any) -> Any:
        return Drain(("p1", "d1", "w1")[choice.a % 3])

    def look(self, choice: Choice, _: Any) -> Any:
        return (Cluster(), Holdings(list(NODES)[choice.a % 6]), Snapshot(client_id=f"client{choice.a % 5}"))[
            choice.b % 3
        ]

    def deregister(self, choice: Choice, _: Any) -> Any:
        return Deregister(("p1", "d1", "w1")[choice.a % 3])


def normal(answer: Any) -> Any:
    """Without the server's wall clock and life."""
    if isinstance(answer, SnapshotAnswer):
        return replace(answer, timeline=dict.fromkeys(answer.timeline, 0))
    return replace(answer, run_id="") if hasattr(answer, "run_id") else answer


def check_consistent(dump: dict[str, Any]) -> None:
    """What must hold between records, lines, guards, leases and holdings after every single step."""
    records = dump["records"]
    running = {uid: r for uid, r in records.items() if r["state"] in IN_PROCESS}
    queued = {uid for uid, r in running.items() if r["state"] == "QUEUED"}
    prefilling = {uid for uid, r in running.items() if r["state"] == "PREFILLING"}
    assert set(dump["queue"]) == set(dump["rings"]) == queued
    assert set(dump["deadlines"]) == queued | prefilling
    assert set(dump["waiters"]) <= {uid for uid in prefilling if not records[uid]["lease"]}
    assert dump["guards"] == {r["client"]: uid for uid, r in running.items()}
    assert all(bool(r["watchers"]) == (uid in running) for uid, r in records.items())
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
    assert set(dump["owned"]) <= set(dump["nodes"]) == set(dump["fresh"])


def check_steps(before: dict[str, Any], after: dict[str, Any]) -> None:
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
def test_they_agree(make_worlds: Callable[[], tuple[Any, Any]], seed: int, length: int) -> None:
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
                    each.advance((100, 900, 2_500)[choice.a % 3])
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
        for inc in NODES:
            assert twin.do(Holdings(inc)) == real.do(Holdings(inc))
            assert twin.events(inc) == real.events(inc)
        assert twin.do(Cluster()) == real.do(Cluster())
    finally:
        twin.close()
        real.close()
