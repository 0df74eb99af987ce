"""What must hold after every happening, checked against a second, much simpler book-keeping of the ledger's answers.

The checker never asks the ledger who owns what: it concludes that from who was told so. An emission, activation or
failure that lands must then be that of the last holder; states follow their own table; tokens are the reference's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app.protocol.commands import (
    EXEMPT_FROM_NOT_AFTER,
    Abort,
    Activate,
    Admit,
    Claim,
    Command,
    Detach,
    Emit,
    Event,
    FailAttempt,
    FailureKind,
    Heartbeat,
    Register,
    ReportExit,
    ReserveNext,
    Scan,
)
from tests.sim.blame import may_cost, may_count
from tests.sim.shadow import ENDS, NEXT, Shadow, Violation
from tests.sim.store_check import check_store
from tests.sim.takeover import still_held, taken_late

__all__ = ["Checker", "Shadow", "Violation"]

if TYPE_CHECKING:
    from app.ledger.memory.state import Record
    from tests.sim.client import Wish
    from tests.sim.world import World

_MOST_OVERLOADS = 30
"""After so many attempts that were nobody's failure one more may count as one: nothing goes round for ever."""


class Checker:
    """Hears of every command that the ledger has applied."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wishes: dict[str, Wish] = {}
        self._shadows: dict[str, Shadow] = {}
        self._in_process: set[str] = set()
        self._buried: set[str] = set()
        """uids that were aborted before they were admitted."""
        self._names: dict[str, str] = {}
        """Which request each fence and lease id got last."""
        self.heard_at: dict[str, float] = {}
        """When the ledger last heard a sign of life of an incarnation, which may have been long under way."""
        self._told_end: set[tuple[str, str]] = set()
        self._handlers: dict[type, Callable[[Any, Any], None]] = {
            Admit: self._admit,
            Claim: self._claim,
            ReserveNext: self._reserve,
            Activate: self._activate,
            Emit: self._emit,
            FailAttempt: self._fail,
            Abort: self._ended_by_client,
            Detach: self._ended_by_client,
            Heartbeat: self._heard,
            Register: self._heard,
            Scan: self._scanned,
            ReportExit: self._scanned,
        }

    def submitted(self, uid: str, wish: Wish) -> None:
        """Web is about to admit ``wish`` as ``uid``."""
        self._wishes[uid] = wish

    def wish_of(self, uid: str) -> Wish:
        return self._wishes[uid]

    def save(self) -> Any:
        """What has to go back when the ledger does."""
        return copy.deepcopy((self._shadows, self._in_process, self._buried, self._names, self._told_end))

    def restore(self, saved: Any) -> None:
        """The ledger went back."""
        self._shadows, self._in_process, self._buried, self._names, self._told_end = saved

    def applied(self, command: Command, answer: Any, not_after_ms: int) -> None:
        """The ledger has applied ``command``."""
        late = answer.time_ms > not_after_ms and type(command) not in EXEMPT_FROM_NOT_AFTER
        if late != (getattr(answer, "status", "") == "LATE"):
            raise self._world.violation(f"{command} until {not_after_ms} is answered {answer}")
        handler = self._handlers.get(type(command))
        if handler is not None:
            handler(command, answer)

    def told(self, web: str, event: Event) -> None:
        """The ledger has appended ``event`` to a web's stream."""
        if (web, event.uid) in self._told_end:
            raise self._wrong(event.uid, f"another event after the terminal one: {event}")
        if event.state in ENDS:
            self._told_end.add((web, event.uid))

    def audit(self) -> None:
        """Compare everything; costs more."""
        for shadow in self._shadows.values():
            self._agree(shadow)
        held = still_held(self._world, (self._shadows[uid] for uid in self._in_process))
        problem = held or check_store(self._world.ledger.store)
        if problem:
            raise self._world.violation(*problem)

    # what each command may do

    def _admit(self, command: Admit, answer: Any) -> None:
        uid = command.uid
        if answer.status != "ADMITTED":
            if answer.status == "DUPLICATE" and not (self._holder(command.client_id) or self._dedups(answer.uid)):
                raise self._wrong(uid, f"refused as a duplicate of {answer.uid}, which has ended")
            if answer.status in ("KNOWN", "OTHER_BODY"):
                self._check_key(command, answer)
            return
        if uid in self._buried:
            raise self._wrong(uid, "admitted though it had been aborted")
        if uid in self._shadows:
            return
        holder = self._holder(command.client_id)
        if holder:
            raise self._wrong(uid, f"admitted while {holder} with the same client id is in process")
        for each in (uid, *(other.uid for other in command.more)):
            self._shadows[each] = Shadow(each, group=uid)
            self._in_process.add(each)
            self._agree(self._shadows[each])

    def _holder(self, client_id: str) -> str:
        return next((uid for uid in self._in_process if self._wishes[uid].client_id == client_id), "")

    def _dedups(self, uid: str) -> bool:
        shadow = self._shadows[uid]
        return shadow.state == "FINISHED" and self._wishes[uid].limits.dedup_window_ms > 0

    def _check_key(self, command: Admit, answer: Any) -> None:
        """What is found by a key is what that key asked for."""
        mine, found = self._wishes[command.uid], self._wishes[answer.uid]
        if mine.key != found.key or (mine.body == found.body) != (answer.status == "KNOWN"):
            raise self._wrong(command.uid, f"its key finds {answer.uid} ({answer.status})")

    def _claim(self, command: Claim, answer: Any) -> None:
        if answer.status != "CLAIMED":
            return
        work = answer.work
        shadow = self._shadows[work.uid]
        wish = self._wishes[work.uid]
        if (work.prompt_ids, work.output_ids) != (wish.prompt, tuple(shadow.tokens)):
            raise self._wrong(work.uid, "the work is not what the client asked for")
        self._check_new(command.fence, work.uid)
        if (shadow.fence, shadow.owner, shadow.state) != (command.fence, command.incarnation, "PREFILLING"):
            self._step(shadow, "PREFILLING", "claimed")
            shadow.fence, shadow.owner, shadow.lease = command.fence, command.incarnation, ""
        self._agree(shadow)

    def _check_new(self, name: str, uid: str) -> None:
        """A fence or lease id that holds one request never gets another one."""
        earlier = self._shadows.get(self._names.get(name, uid))
        if earlier is not None and earlier.uid != uid and earlier.computing and name in (earlier.fence, earlier.lease):
            raise self._wrong(uid, f"{name} gets it, which holds {earlier}")
        self._names[name] = uid

    def _reserve(self, command: ReserveNext, answer: Any) -> None:
        if answer.status != "RESERVED":
            return
        shadow = self._shadows[answer.uid]
        self._check_new(command.lease_id, answer.uid)
        if shadow.lease != command.lease_id:
            if shadow.state != "PREFILLING" or shadow.lease or shadow.fence != answer.fence:
                raise self._wrong(answer.uid, f"{command.lease_id} leases it, which is {shadow}")
            shadow.lease, shadow.lease_node = command.lease_id, command.incarnation
        if shadow.lease_node != command.incarnation:
            raise self._wrong(answer.uid, f"{command.incarnation} is told that it holds the lease of {shadow}")
        self._agree(shadow)

    def _activate(self, command: Activate, answer: Any) -> None:
        if answer.status != "ACTIVATED":
            return
        shadow = self._shadows[command.uid]
        named = (command.attempt, command.fence, command.lease_id, command.incarnation)
        if named != (shadow.attempt, shadow.fence, shadow.lease, shadow.lease_node):
            raise self._wrong(command.uid, f"activated by {command.incarnation} under an old fence: {shadow}")
        if shadow.state != "DECODING":
            self._step(shadow, "DECODING", "activated")
            shadow.owner = command.incarnation
        self._appended(shadow, command, (command.token,))
        self._agree(shadow)

    def _emit(self, command: Emit, answer: Any) -> None:
        if answer.status != "OK":
            return
        shadow = self._shadows[command.uid]
        named = (command.attempt, command.fence, command.incarnation)
        if named != (shadow.attempt, shadow.fence, shadow.owner) or not shadow.computing:
            raise self._wrong(command.uid, f"{command.incarnation} emits under an old fence: {shadow}")
        self._appended(shadow, command, command.tokens)
        if command.finish_reason:
            self._finished(shadow, command.finish_reason)
        self._agree(shadow)

    def _appended(self, shadow: Shadow, command: Activate | Emit, tokens: tuple[int, ...]) -> None:
        """These tokens now stand at their index: new ones follow without a gap, others stood there before."""
        known, index = len(shadow.tokens), command.index
        if index > known:
            raise self._wrong(shadow.uid, f"a gap: index {index} after {known} tokens")
        if list(tokens[: known - index]) != shadow.tokens[index : index + len(tokens)]:
            raise self._wrong(shadow.uid, f"tokens {tokens} at index {index} of {shadow.tokens}")
        shadow.tokens += tokens[known - index :]
        wish = self._wishes[shadow.uid]
        if not known and tokens:
            computed_from = self._world.computed_from.get(command.fence, 0)
            if self._record(shadow.uid).cached_tokens != min(computed_from, len(wish.prompt)):
                raise self._wrong(shadow.uid, f"computed from {computed_from}, told as {command.cached_tokens}")
        if not wish.begins(shadow.tokens, ties=self._world.ties):
            raise self._wrong(shadow.uid, f"tokens {tokens} at index {index}, not {wish.answer[index:][: len(tokens)]}")

    def _finished(self, shadow: Shadow, reason: str) -> None:
        if reason != self._wishes[shadow.uid].finish_reason(shadow.tokens):
            raise self._wrong(shadow.uid, f"finish reason {reason} after {shadow.tokens}")
        self._step(shadow, "FINISHED", "finished")

    def _fail(self, command: FailAttempt, answer: Any) -> None:
        if answer.status not in ("REQUEUED", "FAILED"):
            return
        shadow, record = self._shadows[command.uid], self._record(command.uid)
        if (record.attempt, record.state) == (shadow.attempt, shadow.state):
            return  # it had failed before, and is told so again
        owns = shadow.owner == command.incarnation and not command.lease_id
        leases = (shadow.lease, shadow.lease_node) == (command.lease_id, command.incarnation)
        if (command.attempt, command.fence) != (shadow.attempt, shadow.fence) or not (owns or leases):
            raise self._wrong(command.uid, f"{command.incarnation} fails an attempt that is not its own: {shadow}")
        counted = command.kind is FailureKind.FAILURE or shadow.attempt > _MOST_OVERLOADS
        if record.failures != shadow.failures + counted:
            raise self._wrong(command.uid, f"{record.failures} failures after {shadow.failures} and {command.kind}")
        for each in self._group(shadow):
            self._follow(each, final=command.kind is FailureKind.FINAL)

    def _heard(self, command: Heartbeat | Register, answer: Any) -> None:
        incarnation = command.incarnation if isinstance(command, Heartbeat) else command.node.incarnation
        self.heard_at[incarnation] = self._world.timeline.now

    def _ended_by_client(self, command: Abort | Detach, answer: Any) -> None:
        if answer.status == "TOMBSTONED":
            self._buried.add(command.uid)
        if command.uid in self._shadows:
            for shadow in self._group(self._shadows[command.uid]):
                self._follow(shadow)

    def _scanned(self, command: Scan | ReportExit, answer: Any) -> None:
        if isinstance(command, ReportExit) or answer.ran:
            for uid in sorted(self._in_process):
                self._follow(self._shadows[uid])

    # states

    def _group(self, shadow: Shadow) -> list[Shadow]:
        """Those of its request that are in process, itself first."""
        mates = [self._shadows[uid] for uid in sorted(self._in_process) if self._shadows[uid].group == shadow.group]
        return sorted(mates, key=lambda mate: mate is not shadow)

    def _follow(self, shadow: Shadow, *, final: bool = False) -> None:
        """The command may have ended this attempt, or not: take over what the record says, if it may say that.

        ``final``: it said that another try does not help.
        """
        record = self._record(shadow.uid)
        if (record.state, record.attempt) == (shadow.state, shadow.attempt):
            return
        holders = shadow.holders
        if record.attempt > shadow.attempt and record.state != "QUEUED":
            self._step(shadow, "QUEUED", "one scan requeues it, then ends it")
        if record.state not in ("QUEUED", "FAILED", "ABORTED", "EXPIRED"):
            raise self._wrong(shadow.uid, f"became {record.state}")
        self._step(shadow, record.state, f"{record.error_code or record.last_failure}")
        if not shadow.failures <= record.failures <= shadow.failures + 1:
            raise self._wrong(shadow.uid, f"{record.failures} failures after {shadow.failures}")
        reason = record.error_code or record.last_failure.partition(":")[0]
        self._world.count(f"attempt ended: {reason}")
        failures = max(self._record(uid).failures for uid, each in self._shadows.items() if each.group == shadow.group)
        along = record.state == "FAILED" and failures > record.failures
        late = taken_late(self._world, holders) if reason == "node_lost" and not along else ""
        if late:
            raise self._wrong(shadow.uid, f"only now it is taken over: {late}")
        scenario = self._world.scenario
        if record.failures > shadow.failures and not may_count(scenario):
            raise self._wrong(shadow.uid, f"{reason} counts as a failure, and nothing here was anybody's fault")
        if record.state == "QUEUED" and not may_cost(scenario, record.last_failure):
            raise self._wrong(shadow.uid, f"{reason} costs an attempt, and nothing here should")
        shadow.failures = record.failures
        limits = self._wishes[shadow.uid].limits
        if record.state == "FAILED" and failures < limits.max_attempts and not final:
            raise self._wrong(shadow.uid, f"FAILED after {record.failures} of {limits.max_attempts} failures")
        self._agree(shadow)

    def _step(self, shadow: Shadow, state: str, why: str) -> None:
        if state not in NEXT.get(shadow.state, ()):
            raise self._wrong(shadow.uid, f"{why}: {shadow.state} -> {state}: {shadow}")
        shadow.state = state
        if state == "QUEUED":
            shadow.attempt += 1
        if state not in ("PREFILLING", "DECODING"):
            shadow.lease_node = ""
            if state == "QUEUED":
                shadow.fence = shadow.owner = shadow.lease = ""
            else:
                self._in_process.discard(shadow.uid)
                self._world.count(f"state {state}")

    def _agree(self, shadow: Shadow) -> None:
        """The record says what it must."""
        record = self._record(shadow.uid)
        said = (record.state, record.attempt, record.fence, record.owner, record.lease, record.tokens)
        must = (shadow.state, shadow.attempt, shadow.fence, shadow.owner, shadow.lease, shadow.tokens)
        if said != must:
            raise self._wrong(shadow.uid, f"the record says {said}, it must be {must}")

    def _record(self, uid: str) -> Record:
        record = self._world.ledger.store.records.get(uid)
        if record is None:
            raise self._wrong(uid, "the record is gone")
        return record

    def _wrong(self, uid: str, what: str) -> Violation:
        return self._world.violation(f"{uid}: {what}", uid)
