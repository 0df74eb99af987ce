"""What the memory twin keeps: the counterpart of the keys listed in ``lua/_lib/keys.lua``."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.ids import choice_uid
from app.protocol.commands import Event, IdempotencyKey, Limits, Watcher
from app.protocol.tables import IN_PROCESS, LeaseState, RequestState
from app.schemas import FinishReason, Gauges, NodeInfo, SamplingParams
from app.versions import SPOKEN

WALK = 64
PASSED_OVER_MS = 2000
RING_MS = 1000
RING_MAX_MS = 8000
PER_KIND = 128
CLOSED_TTL_MS = 600_000
STONE_MS = 600_000
MOST_LOSSES = 5
MOST_OVERLOADS = 30
SUSPECT_TOKENS = 16
AVOID_MS = 2000
AVOID_DOUBLINGS = 2
AVOID_MEMORY_MS = 60_000
EVENTS_MAXLEN = 100_000
DEAD = -1
"""Score of a node that was declared dead."""


@dataclass(slots=True)
class Record:
    """One request."""

    uid: str
    client_id: str
    seq: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    limits: Limits
    queued_at: int
    watchers: set[Watcher]
    state: RequestState = RequestState.QUEUED
    attempt: int = 1
    failures: int = 0
    fence: str = ""
    owner: str = ""
    lease: str = ""
    claimed_at: int = 0
    waited: int = 0
    ring: int = 1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    """Of each of ``tokens``; empty where the request does not ask for them."""
    prefill_node: str = ""
    decode_node: str = ""
    failed_by: tuple[str, str] | None = None
    failed_as: str = ""
    last_failure: str = ""
    finish_reason: FinishReason | None = None
    error_code: str = ""
    error_detail: str = ""
    timeline: dict[str, int] = field(default_factory=dict)
    key: IdempotencyKey | None = None
    salt: str = ""
    cached_tokens: int = 0
    stamped: bool = False
    losses: int = 0
    overloads: int = 0
    overload_at: int = 0
    overloaded: bool = False
    """That is what it FAILED of."""
    suspect: int = 0
    shunned: str = ""
    shunned_prefill: str = ""
    shunned_until: int = 0
    group: str = ""
    """uid of the first record of its request, where that has several."""
    choices: int = 1
    """(The first one) How many there are."""
    left: int = 0
    """(The first one) How many are in process."""
    ended_as: RequestState | None = None
    """(The first one) The end that one of them brought on all, if not all have FINISHED."""

    @property
    def in_process(self) -> bool:
        return self.state in IN_PROCESS

    @property
    def computing(self) -> bool:
        return self.state in (RequestState.PREFILLING, RequestState.DECODING)

    @property
    def total(self) -> int:
        """Tokens that a prefill has to read."""
        return len(self.prompt_ids) + len(self.tokens)


@dataclass(slots=True)
class Lease:
    """A decode node's reservation of blocks for one attempt."""

    uid: str
    attempt: int
    fence: str
    node: str
    blocks: int
    at: int
    state: LeaseState = LeaseState.RESERVED


@dataclass(slots=True)
class Node:
    """A registered node."""

    info: NodeInfo
    ttl: int
    heartbeat: int
    fresh_until: int
    state: str = "alive"
    gauges: Gauges = field(default_factory=Gauges)
    cursor: int = -1
    suspect: str = ""


Scores = dict[str, int]
"""A sorted set: member → score."""


def ranked(scores: Scores, *, upto: int | None = None, limit: int | None = None) -> list[str]:
    """Members by score, then by name, as a sorted set orders them; those with a score of at most ``upto``."""
    pairs: Iterable[tuple[int, str]] = ((score, member) for member, score in scores.items())
    if upto is not None:
        pairs = (pair for pair in pairs if pair[0] <= upto)
    chosen = sorted(pairs) if limit is None else heapq.nsmallest(limit, pairs)
    return [member for _, member in chosen]


@dataclass(slots=True)
class Store:
    """Everything of one partition."""

    wall: int
    """The server's clock as of the running command, in ms."""
    newest: int = SPOKEN.newest
    """What the process reads whose command is running."""
    version: int = 0
    time: int = -1
    last: int = 0
    scanned: int = -1
    seq: int = 0
    event_number: int = 0
    records: dict[str, Record] = field(default_factory=dict)
    guards: dict[str, str] = field(default_factory=dict)
    latest: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    unwatched: Scores = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    open_leases: Scores = field(default_factory=dict)
    fences: dict[str, str] = field(default_factory=dict)
    queue: Scores = field(default_factory=dict)
    waiters: Scores = field(default_factory=dict)
    deadlines: Scores = field(default_factory=dict)
    rings: Scores = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    owned: dict[str, Scores] = field(default_factory=dict)
    avoided: Scores = field(default_factory=dict)
    avoided_times: dict[str, int] = field(default_factory=dict)
    events: dict[str, deque[tuple[int, Event]]] = field(default_factory=dict)
    tombstones: Scores = field(default_factory=dict)
    exited: Scores = field(default_factory=dict)
    expiring: list[tuple[int, str, str, str]] = field(default_factory=list)
    """Heap of (wall ms, field of this class, key, value): what goes away by itself, as PEXPIRE does it."""

    def start_clock(self) -> None:
        if self.time < 0:
            self.time = self.last = self.wall
            self.version = self.newest

    def advance_clock(self) -> None:
        """Rule 9."""
        self.time += max(0, min(self.wall - self.last, 1000))
        self.last = self.wall

    def expire(self, ttl_ms: int, kind: str, key: str, value: str = "") -> None:
        """Let ``key`` of the field ``kind`` go; with ``value`` only if it still says that then."""
        heapq.heappush(self.expiring, (self.wall + ttl_ms, kind, key, value))

    def forget_expired(self) -> None:
        while self.expiring and self.expiring[0][0] < self.wall:
            _, kind, key, value = heapq.heappop(self.expiring)
            kept = getattr(self, kind)
            if not value or kept.get(key) == value:
                kept.pop(key, None)

    def group_of(self, record: Record) -> list[Record]:
        """All records of its request, the first one first."""
        if not record.group:
            return [record]
        first = self.records[record.group]
        return [self.records[choice_uid(first.uid, index)] for index in range(first.choices)]

    def own(self, incarnation: str, member: str) -> None:
        self.owned.setdefault(incarnation, {})[member] = self.time

    def disown(self, incarnation: str, member: str) -> None:
        owned = self.owned.get(incarnation, {})
        owned.pop(member, None)
        if not owned:
            self.owned.pop(incarnation, None)

    def fresh(self, incarnation: str) -> bool:
        node = self.nodes.get(incarnation)
        return node is not None and node.fresh_until >= self.time

    def worker(self, incarnation: str, role: str) -> Node | None:
        """The node if it may take new work in this role."""
        node = self.nodes.get(incarnation)
        if node is None or not self.fresh(incarnation) or node.info.role != role or node.state != "alive":
            return None
        return node
