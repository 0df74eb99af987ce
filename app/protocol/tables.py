"""The state tables, as data: which states there are and which steps between them exist.

Everything that changes a state goes through these tables: the memory twin and the node machines at run time, the Lua
scripts by their contract tests. The diagrams in the documentation are generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class RequestState(StrEnum):
    QUEUED = "QUEUED"
    PREFILLING = "PREFILLING"
    DECODING = "DECODING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    ABORTED = "ABORTED"
    EXPIRED = "EXPIRED"


class LeaseState(StrEnum):
    RESERVED = "RESERVED"
    ACTIVE = "ACTIVE"
    RELEASED = "RELEASED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"


class BlockState(StrEnum):
    """Of one KV block in a node's pool. Decode uses the first five, prefill FREE, RUNNING, HELD and CACHED."""

    FREE = "FREE"
    RESERVED = "RESERVED"
    """Promised to a lease; nothing is written yet."""
    PULLING = "PULLING"
    """The mover may be writing; free only when the mover says that it has stopped."""
    READY = "READY"
    """Holds a sequence's KV, or was given to a running one that grows; no step is running on it."""
    IN_STEP = "IN_STEP"
    """The running step may be writing; free only when the step says that it has stopped."""
    RUNNING = "RUNNING"
    """A prefill chunk may be writing; one attempt holds it."""
    HELD = "HELD"
    """Its KV is complete, and pinned by those that read it: while they compute, and until a pull is acknowledged."""
    CACHED = "CACHED"
    """Nobody has pinned it, and its content is still known: a prompt that begins with it pins it again, or it is freed
    when room is needed."""


class FailureReason(StrEnum):
    """Why an attempt ended without a token."""

    GRANT_REFUSED = "grant_refused"
    GRANT_UNACKNOWLEDGED = "grant_unacknowledged"
    GRANT_TIMEOUT = "grant_timeout"
    COMMIT_REFUSED = "commit_refused"
    COMMIT_UNACKNOWLEDGED = "commit_unacknowledged"
    PULL_FAILED = "pull_failed"
    PULL_TIMEOUT = "pull_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - not a password
    NODE_LOST = "node_lost"
    ENGINE_ERROR = "engine_error"
    DIFFERENT_TOKENS = "different_tokens"
    HANDED_BACK = "handed_back"
    DRAINING = "draining"
    PREEMPTED = "preempted"
    """No block was free for a sequence that was admitted earlier, on the same decode node."""


REQUEST_STEPS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset(
        {RequestState.PREFILLING, RequestState.FAILED, RequestState.ABORTED, RequestState.EXPIRED}
    ),
    RequestState.PREFILLING: frozenset(
        {
            RequestState.DECODING,
            RequestState.FINISHED,
            RequestState.QUEUED,
            RequestState.FAILED,
            RequestState.ABORTED,
            RequestState.EXPIRED,
        }
    ),
    RequestState.DECODING: frozenset(
        {
            RequestState.FINISHED,
            RequestState.QUEUED,
            RequestState.FAILED,
            RequestState.ABORTED,
            RequestState.EXPIRED,
        }
    ),
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.ABORTED: frozenset(),
    RequestState.EXPIRED: frozenset(),
}

LEASE_STEPS: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.RESERVED: frozenset(
        {LeaseState.ACTIVE, LeaseState.EXPIRED, LeaseState.CANCELLED},
    ),
    LeaseState.ACTIVE: frozenset({LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
    LeaseState.EXPIRED: frozenset(),
    LeaseState.CANCELLED: frozenset(),
}

DECODE_BLOCK_STEPS: Mapping[BlockState, frozenset[BlockState]] = {
    BlockState.FREE: frozenset({BlockState.RESERVED, BlockState.READY}),
    BlockState.RESERVED: frozenset({BlockState.PULLING, BlockState.FREE}),
    BlockState.PULLING: frozenset({BlockState.READY, BlockState.FREE}),
    BlockState.READY: frozenset({BlockState.IN_STEP, BlockState.FREE}),
    BlockState.IN_STEP: frozenset({BlockState.READY, BlockState.FREE}),
}

PREFILL_BLOCK_STEPS: Mapping[BlockState, frozenset[BlockState]] = {
    BlockState.FREE: frozenset({BlockState.RUNNING}),
    BlockState.CACHED: frozenset({BlockState.HELD, BlockState.FREE}),
    BlockState.RUNNING: frozenset({BlockState.HELD, BlockState.FREE}),
    BlockState.HELD: frozenset({BlockState.FREE, BlockState.CACHED}),
}

TERMINAL: frozenset[RequestState] = frozenset(s for s, steps in REQUEST_STEPS.items() if not steps)
"""States that a request never leaves. Its guard is gone then, its lease closed, its terminal event written."""

IN_PROCESS: frozenset[RequestState] = frozenset(REQUEST_STEPS) - TERMINAL


class IllegalStep(Exception):
    """A step that is in no table: a bug of the caller, never of a peer."""


def step_request(old: RequestState, new: RequestState) -> RequestState:
    """Return ``new`` if a request may go there from ``old``, else raise IllegalStep."""
    if new not in REQUEST_STEPS[old]:
        raise IllegalStep(f"request: {old} -> {new}")
    return new


def step_lease(old: LeaseState, new: LeaseState) -> LeaseState:
    """Return ``new`` if a lease may go there from ``old``, else raise IllegalStep."""
    if new not in LEASE_STEPS[old]:
        raise IllegalStep(f"lease: {old} -> {new}")
    return new
