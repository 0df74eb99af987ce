"""A `World` per test: one ledger, twin or real, with the means to move its time and to look at everything it keeps."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from app.ledger.api import Ledger
from app.ledger.memory import MemoryLedger
from app.ledger.redis import RedisLedger
from app.protocol.commands import (
    Activate,
    ActivateAnswer,
    Admit,
    AdmitAnswer,
    Claim,
    ClaimAnswer,
    ClaimStatus,
    Cluster,
    Emit,
    EmitAnswer,
    FailAnswer,
    FailAttempt,
    FailureKind,
    Limits,
    NodeAnswer,
    Register,
    ReserveAnswer,
    ReserveNext,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)
from app.schemas import NodeInfo, Role, SamplingParams
from app.valkey import EmbeddedValkey

START_MS = 1_790_000_000_000
_namespaces = itertools.count()

LIMITS = Limits(
    max_attempts=3,
    max_queued=100,
    queue_timeout_ms=60_000,
    first_token_timeout_ms=300_000,
    record_ttl_ms=60_000,
)


class World:
    """One ledger under test. Ledger time moves with ``advance`` only, so that both kinds answer with the same times."""

    kind: str
    ledger: Ledger

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    # time

    def advance(self, ms: int) -> None:
        raise AssertionError

    def hold_time(self) -> None:
        """Keep the next heartbeat or scan from moving ledger time."""
        raise AssertionError

    def clock_was(self, ms_ago: int) -> None:
        """Let the last advance of ledger time have happened ``ms_ago`` by the server's clock."""
        raise AssertionError

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let the server's clock (not ledger time) go on until ``condition`` holds."""
        raise AssertionError

    def dump(self) -> dict[str, Any]:
        raise AssertionError

    def impatient(self) -> Ledger:
        """The same ledger for a caller all of whose calls arrive after their not_after."""
        raise AssertionError

    def close(self) -> None:
        self.ledger.close()

    # commands with defaults

    def do(self, command: Any) -> Any:
        self.hold_time()
        return self.ledger.execute(command)

    def node(self, incarnation: str, role: Role, **more: Any) -> NodeAnswer:
        ttl = more.pop("ttl", 10_000_000)
        holds_kv = role in ("prefill", "decode")
        fields: dict[str, Any] = {
            "name": f"{incarnation}@host",
            "pid": 1,
            "host": "host",
            "address": f"tcp://{incarnation}",
            "model": "" if role == "control" else "model-1",
            "layout": "layout-1" if holds_kv else "",
            "num_blocks": 100 if holds_kv else 0,
            "block_size_tokens": 16,
        }
        answer: NodeAnswer = self.do(Register(NodeInfo(incarnation=incarnation, role=role, **(fields | more)), ttl))
        return answer

    def cluster(self) -> None:
        """web ``w``, prefill ``p``, decode ``d``."""
        self.node("w", "web")
        self.node("p", "prefill")
        self.node("d", "decode")

    def admit(
        self, uid: str, client: str = "", *, prompt: int = 20, max_tokens: int = 12, web: str = "w", **limits: int
    ) -> AdmitAnswer:
        answer: AdmitAnswer = self.do(
            Admit(
                uid,
                client or f"client-{uid}",
                tuple(range(prompt)),
                SamplingParams(seed=2**62 + 1, max_tokens=max_tokens, temperature=0.7, stop=("\n", "é")),
                Watcher(web, f"connection-{uid}"),
                replace(LIMITS, **limits),
            )
        )
        return answer

    def claim(self, fence: str, hint: str = "", *, node: str = "p", free: int = 100, size: int = 16) -> ClaimAnswer:
        answer: ClaimAnswer = self.do(Claim(hint, node, fence, free, size))
        return answer

    def reserve(self, lease: str, hint: str = "", *, node: str = "d", free: int = 100, size: int = 16) -> ReserveAnswer:
        answer: ReserveAnswer = self.do(ReserveNext(hint, node, lease, free, size))
        return answer

    def emit(
        self, uid: str, index: int, *tokens: int, fence: str = "f", node: str = "p", attempt: int = 1, end: Any = None
    ) -> EmitAnswer:
        answer: EmitAnswer = self.do(Emit(uid, attempt, fence, node, index, tokens, end))
        return answer

    def activate(
        self,
        uid: str,
        token: int = 7,
        *,
        index: int = 0,
        fence: str = "f",
        lease: str = "l",
        attempt: int = 1,
        **more: Any,
    ) -> ActivateAnswer:
        node = more.pop("node", "d")
        answer: ActivateAnswer = self.do(Activate(uid, attempt, fence, lease, node, index, token, **more))
        return answer

    def fail(
        self,
        uid: str,
        *,
        fence: str = "f",
        node: str = "p",
        lease: str = "",
        attempt: int = 1,
        kind: FailureKind = FailureKind.FAILURE,
        reason: str = "engine_error",
    ) -> FailAnswer:
        answer: FailAnswer = self.do(FailAttempt(uid, attempt, fence, node, lease, kind, reason, "why"))
        return answer

    def read(self, uid: str = "", **more: Any) -> SnapshotAnswer:
        answer: SnapshotAnswer = self.do(Snapshot(uid, **more))
        return answer

    # shortcuts into a state

    def prefilling(self, uid: str = "u", fence: str = "f", **more: Any) -> None:
        self.admit(uid, **more)
        assert self.claim(fence, uid, free=10_000).status is ClaimStatus.CLAIMED

    def decoding(self, uid: str = "u", fence: str = "f", lease: str = "l", **more: Any) -> None:
        """Its first token is 7."""
        self.prefilling(uid, fence, **more)
        assert self.reserve(lease, uid, free=10_000).status == "RESERVED"
        assert self.emit(uid, 0, 7, fence=fence).status == "OK"
        assert self.activate(uid, fence=fence, lease=lease).status == "ACTIVATED"

    # looking

    def state(self, uid: str = "u") -> str:
        return self.read(uid).state

    def lease_state(self, lease: str = "l") -> str:
        return str(self.dump()["leases"][lease]["state"])

    def owned(self, node: str) -> set[str]:
        return set(self.dump()["owned"].get(node, {}))

    def events(self, web: str = "w") -> list[Any]:
        return [event for _, event in self.ledger.read_events(web, "0", 0)]


class TwinWorld(World):
    kind = "twin"
    ledger: MemoryLedger

    def __init__(self) -> None:
        self.wall = START_MS
        super().__init__(MemoryLedger(lambda: self.wall))
        self.ledger.time_ms()

    def advance(self, ms: int) -> None:
        self.ledger.store.time += ms

    def hold_time(self) -> None:
        self.ledger.store.last = self.wall

    def clock_was(self, ms_ago: int) -> None:
        self.ledger.store.last = self.wall - ms_ago

    def wait_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.wall += 10
        raise AssertionError("the condition never came true")

    def impatient(self) -> Ledger:
        other = MemoryLedger(lambda: self.wall, call_ttl_ms=-1)
        other.store = self.ledger.store
        return other

    def dump(self) -> dict[str, Any]:
        store = self.ledger.store
        return {
            "records": {
                uid: {
                    "state": str(record.state),
                    "attempt": record.attempt,
                    "failures": record.failures,
                    "fence": record.fence,
                    "owner": record.owner,
                    "lease": record.lease,
                    "client": record.client_id,
                    "waited": record.waited,
                    "tokens": list(record.tokens),
                    "watchers": sorted(f"{w.web}:{w.connection}" for w in record.watchers),
                    "finish_reason": record.finish_reason or "",
                    "error": f"{record.error_code}/{record.error_detail}",
                }
                for uid, record in store.records.items()
            },
            "guards": dict(store.guards),
            "latest": dict(store.latest),
            "leases": {
                key: {"state": str(lease.state), "uid": lease.uid, "node": lease.node, "blocks": lease.blocks}
                for key, lease in store.leases.items()
            },
            "open_leases": dict(store.open_leases),
            "owned": {inc: dict(members) for inc, members in store.owned.items()},
            "nodes": {inc: node.state for inc, node in store.nodes.items()},
            "fresh": {inc: node.fresh_until for inc, node in store.nodes.items()},
            **{name: dict(getattr(store, name)) for name in ("queue", "waiters", "deadlines", "rings")},
            **{name: dict(getattr(store, name)) for name in ("tombstones", "exited")},
        }


class ValkeyWorld(World):
    kind = "valkey"
    ledger: RedisLedger

    def __init__(self, url: str) -> None:
        self.url = url
        self.namespace = f"test{next(_namespaces)}"
        self.prefix = f"{self.namespace}:{{0}}:"
        self.raw = redis.Redis.from_url(url, decode_responses=True, protocol=2)
        super().__init__(RedisLedger(url, self.namespace, timeout_s=5))
        self.raw.hset(f"{self.prefix}clock", mapping={"time": START_MS, "last": 2 * START_MS, "scan": -1})

    def advance(self, ms: int) -> None:
        self.raw.hincrby(f"{self.prefix}clock", "time", ms)
        self.ledger.execute(Cluster())  # an answer with the new time, so that the next call is not late

    def hold_time(self) -> None:
        self.raw.hset(f"{self.prefix}clock", "last", 2 * START_MS)

    def clock_was(self, ms_ago: int) -> None:
        seconds, micros = self.raw.time()
        self.raw.hset(f"{self.prefix}clock", "last", seconds * 1000 + micros // 1000 - ms_ago)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline, never = time.monotonic() + 10, threading.Event()
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            never.wait(0.01)

    def impatient(self) -> Ledger:
        return RedisLedger(self.url, self.namespace, timeout_s=5, call_ttl_ms=-1)

    def close(self) -> None:
        super().close()
        self.raw.close()

    def _read_all(self) -> dict[str, Any]:
        """Every key of the namespace with its value, in two round trips."""
        keys = sorted(self.raw.scan_iter(match=f"{self.prefix}*", count=10_000))
        types = self._batch((key, "type", ()) for key in keys)
        reads: dict[str, tuple[str, tuple[Any, ...]]] = {
            "hash": ("hgetall", ()),
            "zset": ("zrange", (0, -1, False, True, int)),
            "string": ("get", ()),
            "set": ("smembers", ()),
            "list": ("lrange", (0, -1)),
            "stream": ("xlen", ()),
        }
        known = [(key, kind) for key, kind in zip(keys, types, strict=True) if kind in reads]
        values = self._batch((key, *reads[kind]) for key, kind in known)
        return {key.removeprefix(self.prefix): value for (key, _), value in zip(known, values, strict=True)}

    def _batch(self, calls: Iterable[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        pipe = self.raw.pipeline(transaction=False)
        for key, method, arguments in calls:
            getattr(pipe, method)(key, *arguments)
        return pipe.execute()

    def dump(self) -> dict[str, Any]:
        found = self._read_all()

        def all_of(kind: str) -> dict[str, Any]:
            return {key.removeprefix(kind): value for key, value in found.items() if key.startswith(kind)}

        def record(uid: str, fields: dict[str, str]) -> dict[str, Any]:
            chosen: dict[str, Any] = {name: fields[name] for name in ("state", "fence", "owner", "lease", "client")}
            return chosen | {
                **{name: int(fields[name]) for name in ("attempt", "failures", "waited")},
                "tokens": [int(token) for token in found.get(f"tok:{uid}", ())],
                "watchers": sorted(found.get(f"watch:{uid}", ())),
                "finish_reason": fields.get("finish_reason", ""),
                "error": f"{fields.get('error_code', '')}/{fields.get('error_detail', '')}",
            }

        def lease(fields: dict[str, str]) -> dict[str, Any]:
            return {name: fields[name] for name in ("state", "uid", "node")} | {"blocks": int(fields["blocks"])}

        zsets = ("queue", "waiters", "deadlines", "rings", "tombstones", "exited")
        return {
            "records": {uid: record(uid, fields) for uid, fields in all_of("rec:").items()},
            "guards": all_of("guard:"),
            "latest": all_of("latest:"),
            "leases": {key: lease(fields) for key, fields in all_of("lease:").items()},
            "open_leases": dict(found.get("leases", ())),
            "owned": {inc: dict(members) for inc, members in all_of("owned:").items()},
            "nodes": {inc: fields["state"] for inc, fields in all_of("node:").items()},
            "fresh": dict(found.get("nodes", ())),
            **{name: dict(found.get(name, ())) for name in zsets},
        }


@pytest.fixture(params=["twin", "valkey"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The suite runs on both ledgers."""
    made = TwinWorld() if request.param == "twin" else ValkeyWorld(request.getfixturevalue("valkey").url)
    yield made
    made.close()


@pytest.fixture
def real(valkey: EmbeddedValkey) -> Iterator[ValkeyWorld]:
    """For what only a server can show: concurrency, connections, errors."""
    made = ValkeyWorld(valkey.url)
    yield made
    made.close()


@pytest.fixture(scope="session")
def make_worlds(valkey: EmbeddedValkey) -> Callable[[], tuple[World, World]]:
    """A fresh pair (twin, real) per call, for comparing the two."""
    return lambda: (TwinWorld(), ValkeyWorld(valkey.url))
