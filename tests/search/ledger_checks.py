"""What one command may do to the ledger: compared with the records as they were before it, not with what it answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from app.ledger.memory.state import Record, Store
from app.protocol.commands import Abort, Activate, Command, Emit, Event, FailAttempt, ReportExit, Scan
from tests.search.configuration import Configuration, Request
from tests.search.violation import Violation
from tests.sim.store_check import check_store

_ENDED = frozenset({"FINISHED", "FAILED", "ABORTED", "EXPIRED"})
_COMPUTING = ("PREFILLING", "DECODING")


class Seen(NamedTuple):
    """What a record said."""

    state: str
    attempt: int
    fence: str
    owner: str
    lease: str
    lease_node: str
    failures: int
    tokens: tuple[int, ...]


Before = dict[str, Seen]


def see(store: Store) -> Before:
    """What all records say."""
    return {uid: _seen(store, record) for uid, record in store.records.items()}


def _seen(store: Store, record: Record) -> Seen:
    lease = store.leases.get(record.lease)
    return Seen(
        record.state,
        record.attempt,
        record.fence,
        record.owner,
        record.lease,
        lease.node if lease else "",
        record.failures,
        tuple(record.tokens),
    )


class LedgerChecks:
    """Raises Violation."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._requests = {request.uid: request for request in configuration.requests}

    def check(self, before: Before, command: Command | None, answer: Any, store: Store, events: list[Event]) -> None:
        """``command`` has been applied (None: time has passed, with heartbeats and a scan)."""
        after = see(store)
        for uid, was in before.items():
            if uid not in after:
                raise Violation(f"the record of {uid} is gone")
            self._check_change(uid, was, after[uid], command)
        for uid, now in after.items():
            self._check_tokens(self._requests[uid], now)
            ended = now.state in _ENDED and (uid not in before or before[uid].state not in _ENDED)
            self._check_events(self._requests[uid], [event for event in events if event.uid == uid], ended)
        if command is not None:
            self._check_fences(before, after, command, answer)
        problem = check_store(store)
        if problem:
            raise Violation(problem[0])

    def _check_change(self, uid: str, was: Seen, now: Seen, command: Command | None) -> None:
        if now == was:
            return
        others = not isinstance(command, Scan | ReportExit | None) and getattr(command, "uid", uid) != uid
        if others or was.state in _ENDED:
            raise Violation(f"{uid} was {was} and is {now} after {command}")
        if now.tokens[: len(was.tokens)] != was.tokens:
            raise Violation(f"the answer of {uid} was {was.tokens} and is {now.tokens}")
        if not (was.attempt <= now.attempt <= was.attempt + 1 and was.failures <= now.failures <= was.failures + 1):
            raise Violation(f"{uid}: attempt {was.attempt}, {was.failures} failures -> {now.attempt}, {now.failures}")
        self._check_state(uid, now, command)

    def _check_state(self, uid: str, now: Seen, command: Command | None) -> None:
        """Nothing that a retry helps against ends a request while attempts are left, and no fault costs more than one
        of them; only its client aborts it."""
        most = self._configuration.max_attempts
        if now.state == "FAILED" and (now.failures < most or self._configuration.faults < most):
            raise Violation(
                f"{uid} FAILED after {now.failures} of {most} attempts, {self._configuration.faults} faults"
            )
        if now.state == "ABORTED" and not isinstance(command, Abort):
            raise Violation(f"{uid} is ABORTED by {command}")
        if now.state == "EXPIRED":
            raise Violation(f"{uid} is EXPIRED, though it may wait without end")
        if now.state == "FINISHED" and now.tokens != self._requests[uid].answer:
            raise Violation(f"{uid} is FINISHED with {now.tokens}, its answer is {self._requests[uid].answer}")

    @staticmethod
    def _check_tokens(request: Request, now: Seen) -> None:
        if now.tokens != request.answer[: len(now.tokens)]:
            raise Violation(f"{request.uid} is answered {now.tokens}, its own answer is {request.answer}")

    @staticmethod
    def _check_events(request: Request, events: list[Event], ended: bool) -> None:
        for number, event in enumerate(events):
            if event.tokens != request.answer[event.index : event.index + len(event.tokens)]:
                raise Violation(f"{request.uid}: its client is told {event}")
            if bool(event.state) != (ended and number == len(events) - 1):
                raise Violation(f"{request.uid}: not one terminal event, the last one: {events}")
        if ended and not events:
            raise Violation(f"{request.uid} ends without a terminal event")

    @staticmethod
    def _check_fences(before: Before, after: Before, command: Command, answer: Any) -> None:
        """Rule 4: only the holder of the current fence emits, activates, fails."""
        uid = getattr(command, "uid", "")
        was = before.get(uid)
        if was is None:
            return
        match command:
            case Emit() if answer.status == "OK":
                named = (command.attempt, command.fence, command.incarnation)
                fine = (was.attempt, was.fence, was.owner) == named and was.state in _COMPUTING
            case Activate() if answer.status == "ACTIVATED":
                by_lease = (command.attempt, command.fence, command.lease_id, command.incarnation)
                fine = (was.attempt, was.fence, was.lease, was.lease_node) == by_lease and was.state in _COMPUTING
            case FailAttempt() if after[uid] != was:
                owns = not command.lease_id and was.owner == command.incarnation
                leases = (was.lease, was.lease_node) == (command.lease_id, command.incarnation)
                fine = (was.attempt, was.fence) == (command.attempt, command.fence) and (owns or leases)
            case _:
                return
        if not fine:
            raise Violation(f"{command} is answered {answer.status} though the record said {was}")
