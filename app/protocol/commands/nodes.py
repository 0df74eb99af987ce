"""What nodes, supervisors and the scans ask: registration, heartbeats, holdings, recovery; and doorbells."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from app.protocol.commands.requests import ReadStatus
from app.schemas import Gauges, NodeInfo


class NodeStatus(StrEnum):
    OK = "OK"
    UNKNOWN = "UNKNOWN"  # not registered (any more), or declared dead: let go of everything, then register again
    REFUSED = "REFUSED"  # ``detail`` says why (model or layout mismatch, exit already reported, still owns)
    DRAINING = "DRAINING"  # (Heartbeat) alive, and asked to drain
    LATE = "LATE"  # (Drain, Deregister)


@dataclass(frozen=True, slots=True)
class Register:
    """Make a node known. Exempt from not_after.

    REFUSED while others live that have another ``model``, or (between nodes that hold KV) another ``layout``. One of
    those others that is silent is declared dead instead: its next beat must not bring it back beside this node.
    """

    node: NodeInfo
    node_ttl_ms: int
    name: ClassVar[str] = "register"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Advances ledger time; never re-creates an entry. Exempt from not_after."""

    incarnation: str
    gauges: Gauges
    name: ClassVar[str] = "heartbeat"


@dataclass(frozen=True, slots=True)
class Drain:
    """Mark a node as draining: it gets no new claims, reservations or activations of new leases."""

    incarnation: str
    name: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True)
class Deregister:
    """Take a node's entry away. REFUSED while it owns anything."""

    incarnation: str
    name: ClassVar[str] = "deregister"


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    status: NodeStatus
    time_ms: int
    detail: str = ""
    run_id: str = ""
    """Identity of the ledger server's life; a change means restart or failover."""
    version: int = 0
    """(Register, Heartbeat) How messages are to be written from now on."""


@dataclass(frozen=True, slots=True)
class ReportExit:
    """A supervisor saw the process of ``incarnation`` end: mark it dead, fail what it owns, remove it. Final."""

    incarnation: str
    name: ClassVar[str] = "report_exit"


@dataclass(frozen=True, slots=True)
class Bell:
    """A doorbell to ring: a Celery message on ``queue`` ("prefill" or "decode") with only these ids in it."""

    queue: str
    uid: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Scan:
    """release_expired_preallocations, recover_orphans, ring_again, and the abort of what nobody watches any more;
    raises the version once every node reads a newer one.

    Does nothing if the last scan is younger than ``min_age_ms``. Bounded work per call (``more`` says that some is
    left). Exempt from not_after; advances ledger time.
    """

    min_age_ms: int
    name: ClassVar[str] = "scan"


@dataclass(frozen=True, slots=True)
class ScanAnswer:
    """Answer of ``Scan`` and ``ReportExit``."""

    ran: bool
    time_ms: int
    bells: tuple[Bell, ...] = ()
    expired: tuple[str, ...] = ()
    """uids that ended EXPIRED or whose lease expired."""
    recovered: tuple[str, ...] = ()
    """uids whose attempt was failed because its node is gone."""
    dead: tuple[str, ...] = ()
    """Incarnations declared dead."""
    more: bool = False


@dataclass(frozen=True, slots=True)
class HeldClaim:
    uid: str
    attempt: int
    fence: str
    state: str
    older_waits: bool = False
    """A request that was admitted earlier is QUEUED (it may be a resumed one)."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    lease_id: str
    uid: str
    attempt: int
    fence: str
    state: str


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the ledger says this node owns and leases (rule 3). Changes nothing."""

    incarnation: str
    name: ClassVar[str] = "holdings"


@dataclass(frozen=True, slots=True)
class HoldingsAnswer:
    status: ReadStatus  # UNKNOWN: the node is not registered
    time_ms: int
    claims: tuple[HeldClaim, ...] = ()
    leases: tuple[HeldLease, ...] = ()
    queued: int = 0
    """Requests that wait for a prefill node."""
    waiting_for_grant: int = 0
    """Requests that wait for a decode node."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and leases, for ``/cluster``. Changes nothing."""

    name: ClassVar[str] = "cluster"


@dataclass(frozen=True, slots=True)
class ClusterNode:
    node: NodeInfo
    gauges: Gauges
    state: str
    """alive, draining, stale (heartbeat older than its TTL) or dead."""
    heartbeat_age_ms: int


@dataclass(frozen=True, slots=True)
class ClusterLease:
    lease_id: str
    uid: str
    client_id: str
    attempt: int
    node: str
    """Name of the decode node."""
    state: str
    age_ms: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    time_ms: int
    nodes: tuple[ClusterNode, ...] = ()
    leases: tuple[ClusterLease, ...] = ()
    queued: int = 0
    waiting_for_grant: int = 0
    version: int = 0
    """How the ledger's data and messages between nodes are written."""
