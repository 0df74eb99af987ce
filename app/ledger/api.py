"""The seam: what every ledger does. ``redis.py`` is the real one, ``memory.py`` its twin; one suite tests both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, overload

from app.errors import LedgerError
from app.protocol.commands import (
    Abort,
    AbortAnswer,
    Activate,
    ActivateAnswer,
    Admit,
    AdmitAnswer,
    Answer,
    Attach,
    AttachAnswer,
    Claim,
    ClaimAnswer,
    Cluster,
    ClusterAnswer,
    Command,
    Deregister,
    Detach,
    Drain,
    Emit,
    EmitAnswer,
    Event,
    FailAnswer,
    FailAttempt,
    Heartbeat,
    Holdings,
    HoldingsAnswer,
    NodeAnswer,
    Register,
    ReportExit,
    ReserveAnswer,
    ReserveNext,
    Scan,
    ScanAnswer,
    Snapshot,
    SnapshotAnswer,
    Stamp,
    StampAnswer,
)


class Ledger(Protocol):
    """One atomic step per command.

    Raises (``execute_many`` answers with them instead, for the command they concern):
        LedgerUnavailable: the command was certainly not applied.
        LedgerUnknown: it may have been applied, or may be until its ``not_after_ms``; conclude only from an answer
            whose ``time_ms`` is past that.
        LedgerForeign: the data in this namespace is not ours, or of another version. Repeating does not help.
    """

    @overload
    def execute(self, command: Admit) -> AdmitAnswer: ...
    @overload
    def execute(self, command: Abort | Detach) -> AbortAnswer: ...
    @overload
    def execute(self, command: Attach) -> AttachAnswer: ...
    @overload
    def execute(self, command: Snapshot) -> SnapshotAnswer: ...
    @overload
    def execute(self, command: Claim) -> ClaimAnswer: ...
    @overload
    def execute(self, command: Stamp) -> StampAnswer: ...
    @overload
    def execute(self, command: FailAttempt) -> FailAnswer: ...
    @overload
    def execute(self, command: ReserveNext) -> ReserveAnswer: ...
    @overload
    def execute(self, command: Activate) -> ActivateAnswer: ...
    @overload
    def execute(self, command: Emit) -> EmitAnswer: ...
    @overload
    def execute(self, command: Register | Heartbeat | Drain | Deregister) -> NodeAnswer: ...
    @overload
    def execute(self, command: Scan | ReportExit) -> ScanAnswer: ...
    @overload
    def execute(self, command: Holdings) -> HoldingsAnswer: ...
    @overload
    def execute(self, command: Cluster) -> ClusterAnswer: ...
    def execute(self, command: Any) -> Any:
        """Apply one command and return its answer."""

    def execute_many(self, commands: Sequence[Command]) -> list[Answer | LedgerError]:
        """Apply commands in order in one round trip; each is atomic for itself, the whole is not.

        One result per command, in order: a command that fails leaves its neighbours their answers.
        """

    def read_events(self, web: str, after: str, block_ms: int) -> list[tuple[str, Event]]:
        """Events for the web process ``web`` after the position ``after`` ("0" = from the start), oldest first.

        Waits up to ``block_ms`` for the first one; returns [] when none came.
        """

    def close(self) -> None:
        """Give the connections back."""
