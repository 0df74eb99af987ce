"""A ledger that is full: many nodes, and requests in every state, loaded through the commands themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import redis

from app.errors import LedgerError
from app.ledger.redis import RedisLedger
from app.protocol.commands import (
    Activate,
    Admit,
    Claim,
    Cluster,
    Command,
    Emit,
    Limits,
    Register,
    ReserveNext,
    Watcher,
)
from app.schemas import NodeInfo, Role, SamplingParams

PROMPT = tuple(range(1000, 1064))
LIMITS = Limits(1_000_000, 1_000_000, 600_000, 600_000, 60_000)  # the same request is handed back with each round
SAMPLING = SamplingParams(seed=1, max_tokens=100_000)
HELD = 32
"""Claims of the measured prefill node and leases of the measured decode node, besides what is measured."""
PER_NODE = 250
"""Claims or leases of each node of the load."""
BATCH = 1000

_uids = itertools.count()


class Store:
    """One server with a ledger in it, and the short ways to work with it."""

    def __init__(self, url: str) -> None:
        self.ledger = RedisLedger(url, "bench", timeout_s=60)
        self.raw = redis.Redis.from_url(url)
        for incarnation, role in (("w", "web"), ("p", "prefill"), ("d", "decode")):
            self.register(incarnation, role)  # type: ignore[arg-type]

    def register(self, incarnation: str, role: Role) -> None:
        info = NodeInfo(
            incarnation=incarnation,
            role=role,
            name=incarnation,
            pid=1,
            host="h",
            num_blocks=0 if role == "web" else 10_000_000,
            block_size_tokens=0 if role == "web" else 16,
            layout="" if role == "web" else "one",
        )
        self.ledger.execute(Register(info, 1_000_000_000))

    def hold_time(self) -> None:
        """Let the next scan or heartbeat not move ledger time, so that no bell is due however long all this takes."""
        self.raw.hset("bench:{0}:clock", "last", 2**52)

    def mute(self, uid: str) -> None:
        """Let this QUEUED request not be rung for."""
        self.raw.zadd("bench:{0}:rings", {uid: 2**52})

    def run(self, commands: Iterable[Command]) -> list[Any]:
        """All of them, pipelined; raises the first error."""
        answers: list[Any] = []
        for batch in _batches(commands):
            self.ledger.execute(Cluster())  # the newest ledger time, however long the last batch took
            answers += self.ledger.execute_many(batch)
        for answer in answers:
            if isinstance(answer, LedgerError):
                raise answer
        return answers

    def close(self) -> None:
        self.ledger.close()
        self.raw.close()


def _batches(commands: Iterable[Command]) -> Iterator[list[Command]]:
    iterator = iter(commands)
    while batch := list(itertools.islice(iterator, BATCH)):
        yield batch


def admission() -> Admit:
    uid = f"u{next(_uids)}"
    return Admit(uid, f"client-{uid}", PROMPT, SAMPLING, Watcher("w", uid), LIMITS)


def fill(store: Store, live: int) -> None:
    """40 % QUEUED, 10 % waiting for a lease, 25 % PREFILLING with a lease, 25 % DECODING: half of them have leases."""
    uids = _admit(store, live)
    claimed = uids[: live * 6 // 10]
    leased = claimed[: live // 2]
    decoding = leased[: live // 4]
    prefill, decode = _nodes(store, "prefill", len(claimed)), _nodes(store, "decode", len(leased))
    store.run(Claim(uid, prefill(i), f"f-{uid}", 1_000, 16) for i, uid in enumerate(claimed))
    store.run(ReserveNext(uid, decode(i), f"l-{uid}", 1_000_000, 16) for i, uid in enumerate(leased))
    store.run(Emit(uid, 1, f"f-{uid}", prefill(i), 0, (5,)) for i, uid in enumerate(decoding))
    store.run(Activate(uid, 1, f"f-{uid}", f"l-{uid}", decode(i), 0, 5) for i, uid in enumerate(decoding))
    found = tuple(store.raw.zcard(f"bench:{{0}}:{name}") for name in ("queue", "waiters", "leases"))
    wanted = (live - len(claimed), len(claimed) - len(leased), len(leased))
    if found != wanted:
        raise RuntimeError(f"queue, waiters and leases have {found} entries, not {wanted}")


def hold(store: Store) -> None:
    """Give the measured nodes ``HELD`` claims and leases."""
    uids = _admit(store, HELD)
    store.run(Claim(uid, "p", f"f-{uid}", 1_000, 16) for uid in uids)
    store.run(ReserveNext(uid, "d", f"l-{uid}", 1_000_000, 16) for uid in uids)


def _admit(store: Store, count: int) -> list[str]:
    admissions = [admission() for _ in range(count)]
    store.run(admissions)
    return [each.uid for each in admissions]


def _nodes(store: Store, role: Role, held: int) -> Callable[[int], str]:
    """Register as many as the load needs; answers which of them holds its i-th piece."""
    count = -(-held // PER_NODE)
    for i in range(count):
        store.register(f"{role}{i}", role)
    return lambda i: f"{role}{i % count}"
