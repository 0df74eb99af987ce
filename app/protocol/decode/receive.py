"""The first half of a decode node's work: reserve → GRANT → (COMMIT received) → pull → activate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.blocks import blocks_for
from app.protocol.commands import (
    Activate,
    ActivateAnswer,
    ActivateStatus,
    FailureKind,
    ReserveAnswer,
    ReserveNext,
    ReserveStatus,
)
from app.protocol.decode.lease import Lease, Phase
from app.protocol.messages import ACCEPTED, NOBODYS, Activating, Commit, Grant, PullResult, Refusal, Reply, refused
from app.protocol.node import LOOK_TRIES, Node
from app.protocol.tables import BlockState, FailureReason


class Receiving(Node[Lease]):
    """Reserves blocks for attempts, pulls their KV, and has them activated."""

    queue = "decode"

    def gauges(self) -> Mapping[str, int]:
        running = sum(lease.phase is Phase.RUNNING for lease in self.table.values())
        return {"running": running, "waiting": len(self.table) - running}

    @abstractmethod
    def _enter_engine(self, lease_id: str, lease: Lease) -> None:
        """It is activated: decode it."""

    @abstractmethod
    def _engine_stopped(self, lease_id: str, lease: Lease) -> None:
        """The engine has dropped it."""

    @abstractmethod
    def _room(self) -> int:
        """Blocks that a new lease may have."""

    # reserve and grant

    def _has_room(self) -> bool:
        return self._room() > 0 and super()._has_room()

    def _ask_for_work(self, bell: on.BellRang) -> None:
        lease_id = self._draw()
        config = self.config
        reserve = ReserveNext(bell.uid, config.incarnation, lease_id, self._room(), config.block_size_tokens)
        self._ask(reserve, partial(self._reserved, bell, lease_id), tries=LOOK_TRIES)

    def _reserved(self, bell: on.BellRang, lease_id: str, answer: ReserveAnswer | None) -> None:
        if answer is None or answer.status is not ReserveStatus.RESERVED:
            outcome = "no answer" if answer is None else answer.status.lower()
            self._work_answered(bell, False, outcome, queue_empty=answer is not None and answer.queue_empty)
            return
        fits = answer.blocks <= self.pool.free  # else they were given to running sequences meanwhile: those come first
        lease = self.table[lease_id] = Lease(
            uid=answer.uid,
            client_id=answer.client_id,
            attempt=answer.attempt,
            fence=answer.fence,
            lease_id=lease_id,
            blocks=self.pool.take(answer.blocks, lease_id, BlockState.RESERVED) if fits else (),
            bell_id=bell.bell_id,
            prefill_incarnation=answer.prefill_incarnation,
            prefill_address=answer.prefill_address,
            seq=answer.seq,
            most_blocks=answer.most_blocks,
            told_blocks=answer.blocks,
        )
        if self.draining:  # asked before the drain, answered after it
            self._work_answered(bell, True)
            self._fail(lease_id, lease, FailureKind.OVERLOAD, FailureReason.DRAINING)
            return
        if not fits:
            self._work_answered(bell, True)
            self._fail(lease_id, lease, FailureKind.OVERLOAD, FailureReason.PREEMPTED, "its blocks are taken")
            return
        self._log("granting", lease, lease=lease_id, blocks=answer.blocks)
        self._grant(lease_id, lease)
        self._work_answered(bell, True)

    def _grant(self, lease_id: str, lease: Lease) -> None:
        grant = Grant(
            uid=lease.uid,
            attempt=lease.attempt,
            fence=lease.fence,
            lease_id=lease_id,
            decode_incarnation=self.config.incarnation,
            decode_address=self.config.address,
        )
        ended = partial(self._grant_ended, lease_id, lease)
        self._call(lease.prefill_address, lease.prefill_incarnation, grant, self.config.link_timeout_s, ended)

    def _grant_ended(self, lease_id: str, lease: Lease, ended: on.CallEnded) -> None:
        if lease.ending or lease.phase is not Phase.GRANTING:
            return  # a COMMIT for it is here already: the grant certainly arrived
        if ended.reply is None:
            reason = FailureReason.GRANT_UNACKNOWLEDGED
            self._fail(lease_id, lease, FailureKind.FAILURE, reason, ended.detail, hop=True)
        elif ended.reply.reason is Refusal.NOT_YET:
            self._grant(lease_id, lease)  # prefill took its time before it said so
        elif not ended.reply.accepted:
            detail = f"{ended.reply.reason} {ended.reply.detail}".strip()
            kind = FailureKind.OVERLOAD if ended.reply.reason in NOBODYS else FailureKind.FAILURE
            self._fail(lease_id, lease, kind, FailureReason.GRANT_REFUSED, detail, hop=True)
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

    def _worked(self, event: on.Stopped | on.Sealed | on.Checked | on.Pulled) -> None:
        match event:
            case on.Pulled():
                lease = self.table.get(event.key)
                if lease is not None and lease.mover_busy:
                    self._pulled(event.key, lease, event)
            case on.Stopped():
                lease = self.table.get(event.key)
                if lease is not None and lease.in_engine:
                    self._engine_stopped(event.key, lease)
            case _:
                raise TypeError(f"a decode node cannot take {event!r}")

    def _pulled(self, lease_id: str, lease: Lease, event: on.Pulled) -> None:
        lease.mover_busy = False
        if lease.ending:
            self._free_if_over(lease_id, lease)
        elif event.reason:
            detail = event.detail or event.reason
            self._fail(lease_id, lease, FailureKind.FAILURE, FailureReason.PULL_FAILED, detail, hop=True)
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
                logprobs=lease.commit.logprobs,
                cached_tokens=lease.commit.cached_tokens,
            )
            self._ask(activate, partial(self._activated, lease_id, lease))
            self._at(self.config.link_timeout_s / 2, partial(self._still_activating, lease_id, lease))

    def _still_activating(self, lease_id: str, lease: Lease) -> None:
        """The ledger is silent: prefill must not take that for our silence. Goes on until the ledger has answered, at
        the latest that the attempt's ``first_token_timeout`` has ended it."""
        if not lease.ending and lease.phase is Phase.ACTIVATING:
            message = Activating(uid=lease.uid, attempt=lease.attempt, fence=lease.fence, lease_id=lease_id)
            self._tell(lease, message)
            self._at(self.config.link_timeout_s, partial(self._still_activating, lease_id, lease))

    def _activated(self, lease_id: str, lease: Lease, answer: ActivateAnswer) -> None:
        if lease.ending or lease.commit is None:
            return
        if answer.status is not ActivateStatus.ACTIVATED or answer.work is None:
            if answer.status is ActivateStatus.FENCED:
                # It is over in some other way; or a rollback has forgotten our lease: nobody's failure.
                self._tell_not_activated(lease_id, lease, FailureKind.OVERLOAD, FailureReason.HANDED_BACK, "fenced")
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
        if answer.work.sampling.logprobs is not None:
            # A ledger that loses one of these tokens loses the activation too: they need not be told again.
            lease.logprobs = [""] * len(lease.output)
        lease.phase = Phase.RUNNING
        self._log("activated", lease, lease=lease_id)
        named = {"uid": lease.uid, "attempt": lease.attempt, "fence": lease.fence, "lease_id": lease_id}
        self._tell(lease, PullResult(**named, activated=True))
        self._enter_engine(lease_id, lease)

    def _tell_not_activated(
        self, lease_id: str, lease: Lease, failure: FailureKind, reason: FailureReason, detail: str
    ) -> None:
        named = {"uid": lease.uid, "attempt": lease.attempt, "fence": lease.fence, "lease_id": lease_id}
        self._tell(lease, PullResult(**named, activated=False, failure=failure, reason=reason, detail=detail))

    def _tell(self, lease: Lease, message: Activating | PullResult) -> None:
        """Tell prefill how its COMMIT goes. If this is lost, prefill asks the ledger when its deadline passes."""
        timeout_s = self.config.link_timeout_s
        self._call(lease.prefill_address, lease.prefill_incarnation, message, timeout_s, self._whatever)
