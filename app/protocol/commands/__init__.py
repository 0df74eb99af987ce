"""The ledger's commands and answers: the only way in which any record changes.

Each command is one atomic step: one Lua script on the server (``lua/<name>.lua``), one method of the memory twin.
Times are *ledger time* in integer milliseconds unless a name says otherwise.

Every answer has ``status`` and ``time_ms``. Every write may answer ``LATE``: it arrived after its ``not_after_ms``
and changed nothing (rule 2). Repeating a command with the same fence, lease id or uid answers as the first time did.
"""

from __future__ import annotations

from app.protocol.commands.attempts import (
    Activate,
    ActivateAnswer,
    ActivateStatus,
    Claim,
    ClaimAnswer,
    ClaimStatus,
    Emit,
    EmitAnswer,
    EmitStatus,
    FailAnswer,
    FailAttempt,
    FailStatus,
    FailureKind,
    ReserveAnswer,
    ReserveNext,
    ReserveStatus,
    Stamp,
    StampAnswer,
    StampStatus,
    Work,
)
from app.protocol.commands.nodes import (
    Bell,
    Cluster,
    ClusterAnswer,
    ClusterLease,
    ClusterNode,
    Deregister,
    Drain,
    Heartbeat,
    HeldClaim,
    HeldLease,
    Holdings,
    HoldingsAnswer,
    NodeAnswer,
    NodeStatus,
    Register,
    ReportExit,
    Scan,
    ScanAnswer,
)
from app.protocol.commands.requests import (
    PHASES,
    Abort,
    AbortAnswer,
    AbortStatus,
    Admit,
    AdmitAnswer,
    AdmitStatus,
    Attach,
    AttachAnswer,
    AttachStatus,
    Detach,
    Event,
    IdempotencyKey,
    Limits,
    ReadStatus,
    Sibling,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)

Command = (
    Admit
    | Abort
    | Detach
    | Attach
    | Snapshot
    | Claim
    | Stamp
    | FailAttempt
    | ReserveNext
    | Activate
    | Emit
    | Register
    | Heartbeat
    | Drain
    | Deregister
    | ReportExit
    | Scan
    | Holdings
    | Cluster
)
Answer = (
    AdmitAnswer
    | AbortAnswer
    | AttachAnswer
    | SnapshotAnswer
    | ClaimAnswer
    | StampAnswer
    | FailAnswer
    | ReserveAnswer
    | ActivateAnswer
    | EmitAnswer
    | NodeAnswer
    | ScanAnswer
    | HoldingsAnswer
    | ClusterAnswer
)
EXEMPT_FROM_NOT_AFTER: frozenset[type] = frozenset({Register, Heartbeat, Scan, ReportExit, Snapshot, Holdings, Cluster})

__all__ = [
    "EXEMPT_FROM_NOT_AFTER",
    "PHASES",
    "Abort",
    "AbortAnswer",
    "AbortStatus",
    "Activate",
    "ActivateAnswer",
    "ActivateStatus",
    "Admit",
    "AdmitAnswer",
    "AdmitStatus",
    "Answer",
    "Attach",
    "AttachAnswer",
    "AttachStatus",
    "Bell",
    "Claim",
    "ClaimAnswer",
    "ClaimStatus",
    "Cluster",
    "ClusterAnswer",
    "ClusterLease",
    "ClusterNode",
    "Command",
    "Deregister",
    "Detach",
    "Drain",
    "Emit",
    "EmitAnswer",
    "EmitStatus",
    "Event",
    "FailAnswer",
    "FailAttempt",
    "FailStatus",
    "FailureKind",
    "Heartbeat",
    "HeldClaim",
    "HeldLease",
    "Holdings",
    "HoldingsAnswer",
    "IdempotencyKey",
    "Limits",
    "NodeAnswer",
    "NodeStatus",
    "ReadStatus",
    "Register",
    "ReportExit",
    "ReserveAnswer",
    "ReserveNext",
    "ReserveStatus",
    "Scan",
    "ScanAnswer",
    "Sibling",
    "Snapshot",
    "SnapshotAnswer",
    "Stamp",
    "StampAnswer",
    "StampStatus",
    "Watcher",
    "Work",
]
