"""The two kinds of `World`, and how each shows all that it keeps in the same form."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import redis

from app.ledger.api import Ledger
from app.ledger.memory import MemoryLedger
from app.ledger.memory.state import Record
from app.ledger.redis import RedisLedger
from app.protocol.commands import Cluster
from app.versions import SPOKEN, Versions
from tests.contract.ledger.support import Dump, World
from tests.waiting import wait_for

START_MS = 1_790_000_000_000
SCORES = ("queue", "waiters", "deadlines", "rings", "unwatched", "avoided", "tombstones", "exited")
_namespaces = itertools.count()


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

    def point(self, kind: str, name: str, uid: str) -> None:
        getattr(self.ledger.store, {"guard": "guards", "latest": "latest", "idem": "keys"}[kind])[name] = uid

    def impatient(self) -> Ledger:
        other = MemoryLedger(lambda: self.wall, call_ttl_ms=-1)
        other.store = self.ledger.store
        return other

    def of_release(self, versions: Versions) -> Ledger:
        other = MemoryLedger(lambda: self.wall, versions=versions)
        other.store = self.ledger.store
        return other

    def dump(self) -> Dump:
        self.ledger.time_ms()  # what has expired goes with the next call
        store = self.ledger.store
        return {
            "records": {uid: self._record(record) for uid, record in store.records.items()},
            "guards": dict(store.guards),
            "latest": dict(store.latest),
            "keys": dict(store.keys),
            "leases": {
                key: {"state": str(lease.state), "uid": lease.uid, "node": lease.node, "blocks": lease.blocks}
                for key, lease in store.leases.items()
            },
            "open_leases": dict(store.open_leases),
            "owned": {inc: dict(members) for inc, members in store.owned.items()},
            "nodes": {inc: node.state for inc, node in store.nodes.items()},
            "fresh": {inc: node.fresh_until for inc, node in store.nodes.items()},
            "suspects": {inc: node.suspect for inc, node in store.nodes.items() if node.suspect},
            "avoided_times": dict(store.avoided_times),
            **{name: dict(getattr(store, name)) for name in SCORES},
        }

    @staticmethod
    def _record(record: Record) -> Dump:
        key = record.key
        return {
            "state": str(record.state),
            "fence": record.fence,
            "owner": record.owner,
            "lease": record.lease,
            "client": record.client_id,
            "attempt": record.attempt,
            "failures": record.failures,
            "waited": record.waited,
            "losses": record.losses,
            "overloads": record.overloads,
            "suspect": record.suspect,
            "stamped": int(record.stamped),
            "grace": record.limits.grace_ms,
            "dedup_window": record.limits.dedup_window_ms,
            "shunned": f"{record.shunned}/{record.shunned_prefill}/{record.shunned_until}",
            "key": f"{key.scoped}/{key.body}" if key else "/",
            "tokens": list(record.tokens),
            "with_logprobs": int(record.sampling.logprobs is not None),
            "logprobs": list(record.logprobs),
            "watchers": sorted(f"{w.web}:{w.connection}" for w in record.watchers),
            "finish_reason": record.finish_reason or "",
            "error": f"{record.error_code}/{record.error_detail}",
            "group": record.group,
            **({"choices": record.choices, "left": record.left} if record.choices > 1 else {}),
            "ended_as": str(record.ended_as or ""),
            "overloaded": int(record.overloaded),
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
        self.raw.hset(
            f"{self.prefix}clock",
            mapping={"time": START_MS, "last": 2 * START_MS, "scan": -1, "version": SPOKEN.newest},
        )

    def advance(self, ms: int) -> None:
        self.raw.hincrby(f"{self.prefix}clock", "time", ms)
        self.ledger.execute(Cluster())  # an answer with the new time, so that the next call is not late

    def hold_time(self) -> None:
        self.raw.hset(f"{self.prefix}clock", "last", 2 * START_MS)

    def clock_was(self, ms_ago: int) -> None:
        seconds, micros = self.raw.time()
        self.raw.hset(f"{self.prefix}clock", "last", seconds * 1000 + micros // 1000 - ms_ago)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, 10)

    def point(self, kind: str, name: str, uid: str) -> None:
        self.raw.set(f"{self.prefix}{kind}:{name}", uid)

    def impatient(self) -> Ledger:
        return RedisLedger(self.url, self.namespace, timeout_s=5, call_ttl_ms=-1)

    def of_release(self, versions: Versions) -> Ledger:
        return RedisLedger(self.url, self.namespace, timeout_s=5, versions=versions)

    def close(self) -> None:
        super().close()
        self.raw.close()

    def _read_all(self) -> Dump:
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

    def dump(self) -> Dump:
        found = self._read_all()

        def all_of(kind: str) -> Dump:
            return {key.removeprefix(kind): value for key, value in found.items() if key.startswith(kind)}

        def record(uid: str, fields: dict[str, str]) -> Dump:
            numbers = ("attempt", "failures", "waited", "losses", "overloads", "suspect", "stamped", "grace")
            numbers += ("dedup_window",)
            return {
                **{name: fields[name] for name in ("state", "fence", "owner", "lease", "client")},
                **{name: int(fields.get(name, 0)) for name in numbers},
                "shunned": "/".join(
                    (fields.get("shunned", ""), fields.get("shunned_prefill", ""), fields.get("shunned_until", "0"))
                ),
                "key": f"{fields['key']}/{fields['body']}",
                "tokens": [int(token) for token in found.get(f"tok:{uid}", ())],
                "with_logprobs": int(fields.get("logprobs", 0)),
                "logprobs": found.get(f"lp:{uid}", []),
                "watchers": sorted(found.get(f"watch:{uid}", ())),
                "finish_reason": fields.get("finish_reason", ""),
                "error": f"{fields.get('error_code', '')}/{fields.get('error_detail', '')}",
                "group": fields.get("group", ""),
                **{name: int(fields[name]) for name in ("choices", "left") if name in fields},
                "ended_as": fields.get("ended_as", ""),
                "overloaded": int(fields.get("overloaded", 0)),
            }

        def lease(fields: dict[str, str]) -> Dump:
            return {**{name: fields[name] for name in ("state", "uid", "node")}, "blocks": int(fields["blocks"])}

        return {
            "records": {uid: record(uid, fields) for uid, fields in all_of("rec:").items()},
            "guards": all_of("guard:"),
            "latest": all_of("latest:"),
            "keys": all_of("idem:"),
            "leases": {key: lease(fields) for key, fields in all_of("lease:").items()},
            "open_leases": dict(found.get("leases", ())),
            "owned": {inc: dict(members) for inc, members in all_of("owned:").items()},
            "nodes": {inc: fields["state"] for inc, fields in all_of("node:").items()},
            "fresh": dict(found.get("nodes", ())),
            "suspects": {inc: fields["suspect"] for inc, fields in all_of("node:").items() if "suspect" in fields},
            "avoided_times": {pair: int(times) for pair, times in found.get("avoided_times", {}).items()},
            **{name: dict(found.get(name, ())) for name in SCORES},
        }
