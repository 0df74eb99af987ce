"""The decode node: reserve → GRANT → (COMMIT received) → pull → activate → decode → last token and end in one step.

It alone writes its own KV blocks (rule 5). Blocks in PULLING or IN_STEP become free only when the mover or the
engine says that it has stopped; every other wait ends by an answer of the ledger or by a deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.blocks import blocks_for
from app.protocol.commands import (
    Activate,
    ActivateAnswer,
    ActivateStatus,
    Emit,
    EmitAnswer,
    EmitStatus,
    FailureKind,
    HeldLease,
    HoldingsAnswer,
    ReserveAnswer,
    ReserveNext,
    ReserveStatus,
    Work,
)
from app.protocol.holding import Held
from app.protocol.messages import ACCEPTED, Commit, Grant, PullResult, Refusal, Reply, refused
from app.protocol.node import LOOK_TRIES, Node
from app.protocol.tables import BlockState, FailureReason
from app.schemas import FinishReason


class Phase(StrEnum):
    """Where a lease stands on the decode node."""

    GRANTING = "granting"  # GRANT sent
    GRANTED = "granted"  # acknowledged; COMMIT is awaited
    PULLING = "pulling"  # the mover copies
    ACTIVATING = "activating"  # the ledger is asked to hand the request over
    RUNNING = "running"  # in the engine, or paused because the ledger is away


@dataclass(slots=True, kw_only=True)
class Lease(Held):
    """One lease. Keyed by its id, which this node drew."""

    prefill_incarnation: str
    prefill_address: str
    phase: Phase = Phase.GRANTING
    commit: Commit | None = None
    committed_at: float = 0.0
    work: Work | None = None
    output: list[int] = field(default_factory=list)
    """All output ids of the request, those of earlier attempts too."""
    told_length: int = 0
    """How many of them the ledger holds."""
    finish: FinishReason | None = None
    emitting: bool = False


class DecodeNode(Node[Lease]):
    """The decode side of the protocol."""

    queue = "decode"

    def gauges(self) -> Mapping[str, int]:
        running = sum(lease.phase is Phase.RUNNING for lease in self.table.values())
        return {"running": running, "waiting": len(self.table) - running}

    # reserve and grant

    def _ask_for_work(self, bell: on.BellRang) -> None:
        lease_id = self._draw()
        reserve = ReserveNext(
            bell.uid, self.config.incarnation, lease_id, self.pool.free, self.config.block_size_tokens
        )
        self._ask(reserve, lambda answer: self._reserved(bell, lease_id, answer), tries=LOOK_TRIES)

    def _reserved(self, bell: on.BellRang, lease_id: str, answer: ReserveAnswer | None) -> None:
        if answer is None or answer.status is not ReserveStatus.RESERVED:
            self._work_answered(bell, False, "no answer" if answer is None else answer.status.lower())
            return
        lease = self.table[lease_id] = Lease(
            uid=answer.uid,
            client_id=answer.client_id,
            attempt=answer.attempt,
            fence=answer.fence,
            lease_id=lease_id,
            blocks=self.pool.take(answer.blocks, lease_id, BlockState.RESERVED),
            bell_id=bell.bell_id,
            prefill_incarnation=answer.prefill_incarnation,
            prefill_address=answer.prefill_address,
        )
        if self.draining:  # asked before the drain, answered after it
            self._work_answered(bell, True)
            self._fail(lease_id, lease, FailureKind.OVERLOAD, FailureReason.DRAINING)
            return
        self._log("granting", lease, lease=lease_id, blocks=answer.blocks)
        grant = Grant(
            uid=answer.uid,
            attempt=answer.attempt,
            fence=answer.fence,
            lease_id=lease_id,
            decode_incarnation=self.config.incarnation,
            decode_address=self.config.address,
        )
        self._call(
            answer.prefill_address,
            answer.prefill_incarnation,
            grant,
            self.config.link_timeout_s,
            lambda ended: self._grant_ended(lease_id, lease, ended),
        )
        self._work_answered(bell, True)

    def _grant_ended(self, lease_id: str, lease: Lease, ended: on.CallEnded) -> None:
        if lease.ending or lease.phase is not Phase.GRANTING:
            return  # a COMMIT for it is here already: the grant certainly arrived
        if ended.reply is None:
            self._fail(lease_id, lease, FailureKind.FAILURE, FailureReason.GRANT_UNACKNOWLEDGED, ended.detail)
        elif not ended.reply.accepted:
            detail = f"{ended.reply.reason} {ended.reply.detail}".strip()
            # Handed back, or given by the ledger to a node that never held it (its claim was applied late).
            nobodys = ended.reply.reason in (Refusal.HANDED_BACK, Refusal.UNKNOWN_ATTEMPT)
            kind = FailureKind.OVERLOAD if nobodys else FailureKind.FAILURE
            self._fail(lease_id, lease, kind, FailureReason.GRANT_REFUSED, detail)
        else:
            lease.phase = Phase.GRANTED

    # pull and activate

    def _called(self, call: on.Called) -> Reply:
        message = call.message
        if not isinstance(message, Commit):
            return refused(Refusal.WRONG_ROLE, message.kind)
        lease = self.table.get(message.lease_id)
        if lease is None or lease.uid != message.uid or lease.attempt != message.attempt:
            return refused(Refusal.UNKNOWN_ATTEMPT)
        if lease.fence != message.fence:
            return refused(Refusal.STALE_FENCE)
        if lease.commit is not None and not lease.ending:
            return ACCEPTED if lease.commit == message else refused(Refusal.WRONG_PHASE, "another commit came first")
        if lease.ending:
            return self._is_ending(lease)
        return self._committed(message, lease)

    def _committed(self, commit: Commit, lease: Lease) -> Reply:
        needed = blocks_for(commit.num_tokens, self.config.block_size_tokens)
        if not len(commit.blocks) == len(commit.generations) == len(commit.digests) == needed <= len(lease.blocks):
            return refused(Refusal.BLOCK_COUNT, f"{commit.num_tokens} tokens, {len(commit.blocks)} blocks")
        lease.commit, lease.committed_at = commit, self._now
        lease.phase, lease.mover_busy = Phase.PULLING, True
        target = lease.blocks[:needed]
        self.pool.move(lease.blocks, commit.lease_id, BlockState.PULLING)
        self._out.append(
            do.Pull(commit.lease_id, commit.location, commit.blocks, commit.generations, commit.digests, target)
        )
        return ACCEPTED

    def _worked(self, event: on.Stopped | on.Sealed | on.Pulled) -> None:
        match event:
            case on.Pulled():
                lease = self.table.get(event.key)
                if lease is not None and lease.mover_busy:
                    self._pulled(event.key, lease, event)
            case on.Stopped():
                lease = self.table.get(event.key)
                if lease is not None and lease.in_engine:
                    self._left_engine(event.key, lease)
                    self._resume_if_told(event.key, lease)
            case _:
                raise TypeError(f"a decode node cannot take {event!r}")

    def _pulled(self, lease_id: str, lease: Lease, event: on.Pulled) -> None:
        lease.mover_busy = False
        if lease.ending:
            self._free_if_over(lease_id, lease)
        elif event.reason:
            self._fail(lease_id, lease, FailureKind.FAILURE, FailureReason.PULL_FAILED, event.detail or event.reason)
        elif lease.commit is not None:
            self.pool.move(lease.blocks, lease_id, BlockState.READY)
            lease.phase = Phase.ACTIVATING
            activate = Activate(
                lease.uid,
                lease.attempt,
                lease.fence,
                lease_id,
                self.config.incarnation,
                lease.commit.index,
                lease.commit.token,
                committed_ago_ms=round(1000 * (self._now - lease.committed_at)),
            )
            self._ask(activate, lambda answer: self._activated(lease_id, lease, answer))

    def _activated(self, lease_id: str, lease: Lease, answer: ActivateAnswer) -> None:
        if lease.ending or lease.commit is None:
            return
        if answer.status is not ActivateStatus.ACTIVATED or answer.work is None:
            if answer.status is ActivateStatus.FENCED:
                self._tell_prefill(lease_id, lease, "fenced")
                self._over(lease_id, lease, "fenced")
            else:
                detail = f"activate answers {answer.status} at index {lease.commit.index}"
                self._fail(lease_id, lease, FailureKind.FINAL, FailureReason.DIFFERENT_TOKENS, detail)
            return
        computed = len(answer.work.prompt_ids) + len(answer.work.output_ids) - 1
        if computed != lease.commit.num_tokens:
            detail = f"KV of {lease.commit.num_tokens} tokens was handed over, {computed} are needed"
            self._fail(lease_id, lease, FailureKind.FAILURE, FailureReason.PULL_FAILED, detail)
            return
        lease.work = answer.work
        lease.output = list(answer.work.output_ids)
        lease.told_length = len(lease.output)
        lease.phase = Phase.RUNNING
        self._log("activated", lease, lease=lease_id)
        self._tell_prefill(lease_id, lease, "")
        self._enter_engine(lease_id, lease)

    def _tell_prefill(self, lease_id: str, lease: Lease, reason: str, detail: str = "") -> None:
        """Tell prefill how its COMMIT ended. If this is lost, prefill asks the ledger when its deadline passes."""
        result = PullResult(
            uid=lease.uid,
            attempt=lease.attempt,
            fence=lease.fence,
            lease_id=lease_id,
            activated=not reason,
            reason=reason,
            detail=detail,
        )
        self._call(
            lease.prefill_address,
            lease.prefill_incarnation,
            result,
            self.config.link_timeout_s,
            lambda ended: None,
        )

    # decode

    def _enter_engine(self, lease_id: str, lease: Lease) -> None:
        if lease.work is None:
            return
        work = replace(lease.work, output_ids=tuple(lease.output))
        lease.in_engine, lease.stop_sent = True, False
        self.pool.move(lease.blocks, lease_id, BlockState.IN_STEP)
        num_computed = len(work.prompt_ids) + len(work.output_ids) - 1
        self._out.append(do.Start(lease_id, work, lease.blocks, num_computed, one_token=False))

    def _left_engine(self, lease_id: str, lease: Lease) -> None:
        lease.in_engine = False
        self.pool.move(lease.blocks, lease_id, BlockState.READY)
        self._free_if_over(lease_id, lease)

    def _sampled(self, sample: on.Sample) -> None:
        lease = self.table.get(sample.key)
        if lease is None or not lease.in_engine:
            return
        if sample.error or sample.finish_reason is not None:
            self._left_engine(sample.key, lease)
        if lease.ending:
            return
        if sample.error:
            self._fail(sample.key, lease, FailureKind.FAILURE, FailureReason.ENGINE_ERROR, sample.error)
            return
        if sample.index != len(lease.output):
            detail = f"the engine sampled index {sample.index}, {len(lease.output)} was next"
            self._fail(sample.key, lease, FailureKind.FAILURE, FailureReason.ENGINE_ERROR, detail)
            return
        lease.output.append(sample.token)
        lease.finish = sample.finish_reason
        self._emit(sample.key, lease)
        if len(lease.output) - lease.told_length > self.config.emit_buffer_tokens:
            self._stop(sample.key, lease)  # the ledger is away: pause until it has caught up

    def _emit(self, lease_id: str, lease: Lease) -> None:
        """Tell the ledger everything it does not hold yet; one such call per sequence at a time."""
        if lease.emitting or lease.ending:
            return
        lease.emitting = True
        tokens = tuple(lease.output[lease.told_length :])
        emit = Emit(
            lease.uid,
            lease.attempt,
            lease.fence,
            self.config.incarnation,
            lease.told_length,
            tokens,
            lease.finish,
        )
        self._ask(emit, lambda answer: self._emitted(lease_id, lease, emit, answer))

    def _emitted(self, lease_id: str, lease: Lease, emit: Emit, answer: EmitAnswer) -> None:
        if lease.ending:
            return
        lease.emitting = False
        match answer.status:
            case EmitStatus.OK | EmitStatus.SAME:
                lease.told_length = max(lease.told_length, emit.index + len(emit.tokens))
                if emit.finish_reason is not None:
                    self._over(lease_id, lease, "finished")
                    return
                self._resume_if_told(lease_id, lease)
            case EmitStatus.GAP:  # the ledger lost some (a rollback): send again from there
                lease.told_length = answer.length
            case EmitStatus.DIFFERENT:
                detail = f"the ledger holds other tokens at index {emit.index}"
                self._fail(lease_id, lease, FailureKind.FINAL, FailureReason.DIFFERENT_TOKENS, detail)
                return
            case _:
                self._over(lease_id, lease, answer.status.lower())
                return
        if len(lease.output) > lease.told_length or lease.finish is not None:
            self._emit(lease_id, lease)

    def _resume_if_told(self, lease_id: str, lease: Lease) -> None:
        """A paused sequence goes on once the ledger holds all of its tokens."""
        paused = lease.phase is Phase.RUNNING and not lease.ending and not lease.in_engine and lease.finish is None
        if paused and lease.told_length == len(lease.output):
            self._enter_engine(lease_id, lease)

    # holdings and drain

    def _failing(self, key: str, held: Lease, reason: str, detail: str) -> None:
        if held.phase in (Phase.PULLING, Phase.ACTIVATING):
            self._tell_prefill(key, held, reason, detail)

    def _decides_itself(self, held: Lease) -> bool:
        return held.ending or (held.finish is not None and held.emitting)

    def _given(self, answer: HoldingsAnswer) -> Iterable[HeldLease]:
        return answer.leases

    def _waits(self, answer: HoldingsAnswer) -> bool:
        return answer.waiting_for_grant > 0

    def _drain(self) -> None:
        """Running sequences and granted leases finish; nothing new is reserved."""
