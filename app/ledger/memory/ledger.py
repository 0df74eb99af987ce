"""The memory twin behind the seam ``app.ledger.api.Ledger``."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.errors import LedgerError, LedgerForeign
from app.ledger.api import Ledger
from app.ledger.ids import CALL_TTL_MS, check_ids
from app.ledger.memory import attempts, handoff, nodes, recovery, requests
from app.ledger.memory.state import Store
from app.protocol.commands import (
    EXEMPT_FROM_NOT_AFTER,
    Abort,
    AbortAnswer,
    AbortStatus,
    Activate,
    ActivateAnswer,
    ActivateStatus,
    Admit,
    AdmitAnswer,
    AdmitStatus,
    Answer,
    Attach,
    AttachAnswer,
    AttachStatus,
    Claim,
    ClaimAnswer,
    ClaimStatus,
    Cluster,
    Command,
    Deregister,
    Detach,
    Drain,
    Emit,
    EmitAnswer,
    EmitStatus,
    Event,
    FailAnswer,
    FailAttempt,
    FailStatus,
    Heartbeat,
    Holdings,
    NodeAnswer,
    NodeStatus,
    Register,
    ReportExit,
    ReserveAnswer,
    ReserveNext,
    ReserveStatus,
    Scan,
    Snapshot,
    Stamp,
    StampAnswer,
    StampStatus,
)
from app.versions import SPOKEN, Versions

_HANDLERS: Mapping[type, Callable[[Store, Any], Answer]] = {
    Admit: requests.admit,
    Abort: requests.abort,
    Detach: requests.detach,
    Attach: requests.attach,
    Snapshot: requests.snapshot,
    Claim: attempts.claim,
    Stamp: attempts.stamp,
    FailAttempt: attempts.fail_attempt,
    ReserveNext: handoff.reserve_next,
    Activate: handoff.activate,
    Emit: attempts.emit,
    Register: nodes.register,
    Heartbeat: nodes.heartbeat,
    Drain: nodes.drain,
    Deregister: nodes.deregister,
    ReportExit: recovery.report_exit,
    Scan: recovery.scan,
    Holdings: nodes.holdings,
    Cluster: nodes.cluster,
}
_LATE: Mapping[type, Callable[[int], Answer]] = {
    Admit: lambda time_ms: AdmitAnswer(AdmitStatus.LATE, time_ms),
    Abort: lambda time_ms: AbortAnswer(AbortStatus.LATE, time_ms),
    Detach: lambda time_ms: AbortAnswer(AbortStatus.LATE, time_ms),
    Attach: lambda time_ms: AttachAnswer(AttachStatus.LATE, time_ms),
    Claim: lambda time_ms: ClaimAnswer(ClaimStatus.LATE, time_ms),
    Stamp: lambda time_ms: StampAnswer(StampStatus.LATE, time_ms),
    FailAttempt: lambda time_ms: FailAnswer(FailStatus.LATE, time_ms),
    ReserveNext: lambda time_ms: ReserveAnswer(ReserveStatus.LATE, time_ms),
    Activate: lambda time_ms: ActivateAnswer(ActivateStatus.LATE, time_ms),
    Emit: lambda time_ms: EmitAnswer(EmitStatus.LATE, time_ms),
    Drain: lambda time_ms: NodeAnswer(NodeStatus.LATE, time_ms),
    Deregister: lambda time_ms: NodeAnswer(NodeStatus.LATE, time_ms),
}


class MemoryLedger:
    """Implements ``app.ledger.api.Ledger`` on plain values; an illegal step raises ``IllegalStep``. Thread-safe.

    A simulator delivers calls late with ``apply``, and rolls the ledger back with ``save`` and ``restore``.
    """

    def __init__(
        self, clock: Callable[[], int], *, call_ttl_ms: int = CALL_TTL_MS, versions: Versions = SPOKEN
    ) -> None:
        """
        Args:
            clock: the server's wall clock in ms; ledger time follows it by rule 9.
            call_ttl_ms: how far behind ledger time a write's ``not_after`` lies.
            versions: of the data that this process reads.
        """
        self._clock = clock
        self._versions = versions
        self._call_ttl_ms = call_ttl_ms
        self._changed = threading.Condition()
        self._life = 1
        self.store = Store(wall=clock())
        """The data; for tests and the simulator's invariants."""

    @property
    def run_id(self) -> str:
        """Identity of this server life; ``restore`` begins a new one."""
        return f"memory-{self._life}"

    def time_ms(self) -> int:
        """Ledger time, without moving it."""
        with self._changed:
            self._begin()
            return self.store.time

    def execute(self, command: Any) -> Any:
        return self.apply(command, self.time_ms() + self._call_ttl_ms)

    def execute_many(self, commands: Sequence[Command]) -> list[Answer | LedgerError]:
        not_after_ms = self.time_ms() + self._call_ttl_ms
        return [self.apply(command, not_after_ms) for command in commands]

    def apply(self, command: Command, not_after_ms: int) -> Answer:
        """Apply one command as if it had been sent when ``not_after_ms`` was drawn."""
        check_ids(command)
        with self._changed:
            self._begin()
            kind = type(command)
            if kind not in EXEMPT_FROM_NOT_AFTER and self.store.time > not_after_ms:
                return _LATE[kind](self.store.time)
            answer = _HANDLERS[kind](self.store, command)
            self._changed.notify_all()
        if isinstance(answer, NodeAnswer):
            version = self.store.version if kind in (Register, Heartbeat) else 0
            return replace(answer, run_id=self.run_id, version=version)
        return answer

    def read_events(self, web: str, after: str, block_ms: int) -> list[tuple[str, Event]]:
        position = int(after.partition("-")[0])
        with self._changed:
            if block_ms > 0:
                self._changed.wait_for(lambda: self._events_after(web, position), block_ms / 1000)
            return self._events_after(web, position)

    def save(self) -> Store:
        """A copy of everything, as an fsync would keep it."""
        with self._changed:
            return copy.deepcopy(self.store)

    def restore(self, store: Store) -> None:
        """Continue from a saved copy: a restart that lost what came after it."""
        with self._changed:
            self.store = copy.deepcopy(store)
            self._life += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing to give back."""

    def _begin(self) -> None:
        self.store.wall, self.store.newest = self._clock(), self._versions.newest
        self.store.start_clock()
        if self.store.version not in self._versions:
            raise LedgerForeign(f"ledger: the data have version {self.store.version}, which is not read here")
        self.store.forget_expired()

    def _events_after(self, web: str, position: int) -> list[tuple[str, Event]]:
        stream = self.store.events.get(web, ())
        return [(f"{number}-0", event) for number, event in stream if number > position]


if TYPE_CHECKING:
    _SEAM: type[Ledger] = MemoryLedger
