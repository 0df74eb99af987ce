"""The second half: (grant held, blocks sealed) → first token told → COMMIT → pull acknowledged → blocks free."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from app.protocol import events as on
from app.protocol.commands import EmitAnswer, EmitStatus, FailureKind, HeldClaim, HeldLease, HoldingsAnswer
from app.protocol.messages import (
    ACCEPTED,
    NOBODYS,
    Activating,
    Commit,
    Grant,
    Message,
    PullResult,
    Refusal,
    Reply,
    refused,
)
from app.protocol.prefill.attempt import Attempt, Phase
from app.protocol.prefill.compute import Computing
from app.protocol.tables import FailureReason

_KV_IN_DOUBT = frozenset({FailureReason.ENGINE_ERROR, FailureReason.PULL_FAILED})
"""Failures that KV may be the cause of: no finite logits come from it, or it is not what was digested."""


class PrefillNode(Computing):
    """The prefill side of the protocol.

    Owner of the attempt from ``claim`` to ``activate``. It owns the deadline for a grant: it rings ``decode`` again
    after 1, 2, 4, then every 4 s, so that a lost bell or a dead decode node costs seconds, not a timeout.
    """

    # hand over

    def _called(self, call: on.Called) -> Reply | None:
        message = call.message
        if isinstance(message, Grant):
            if message.fence not in self.table and self._asking_for_work:
                self._early.append(call)  # our claim may have been applied; its answer decides
                self._at(self.config.link_timeout_s / 2, partial(self._answer_early, call))
                return None
            return self._granted(message)
        if isinstance(message, Activating):
            return self._still_activating(message)
        if isinstance(message, PullResult):
            return self._pull_ended(message)
        return refused(Refusal.WRONG_ROLE, message.kind)

    def _answer_early(self, call: on.Called) -> None:
        """The ledger keeps us waiting: decode must not take that for a lost message."""
        if call in self._early:
            self._early.remove(call)
            self._reply(call, refused(Refusal.NOT_YET, "the claim is not answered"))

    def _known(self, message: Message) -> Attempt | Reply:
        attempt = self.table.get(message.fence)
        if attempt is None or attempt.uid != message.uid or attempt.attempt != message.attempt:
            return refused(Refusal.UNKNOWN_ATTEMPT)
        if attempt.finishing:
            return ACCEPTED  # the end closes the lease: nobody may fail the attempt for it meanwhile
        if attempt.ending:
            return self._is_ending(attempt)
        return attempt

    def _granted(self, grant: Grant) -> Reply:
        attempt = self._known(grant)
        if isinstance(attempt, Reply):
            return attempt
        if attempt.grant is not None:
            return ACCEPTED if attempt.grant == grant else refused(Refusal.OTHER_LEASE, attempt.grant.lease_id)
        attempt.grant = grant
        self._hand_over(grant.fence, attempt)
        return ACCEPTED

    def _hand_over(self, fence: str, attempt: Attempt) -> None:
        """Prefill done and grant held: tell the first token. COMMIT when that is done and the blocks are digested."""
        if attempt.ending or attempt.phase is not Phase.COMPUTED or attempt.grant is None:
            return
        attempt.phase = Phase.SEALING
        emit = self._emit(attempt, (attempt.token,), (attempt.logprobs,) if attempt.logprobs else ())
        # Asked once: where its outcome is unknown, ``activate`` writes the token if the ledger lost it.
        self._ask(emit, partial(self._first_token_told, fence, attempt), tries=0)

    def _first_token_told(self, fence: str, attempt: Attempt, answer: EmitAnswer | None) -> None:
        if attempt.ending:
            return
        if answer is None or answer.status in (EmitStatus.OK, EmitStatus.SAME):
            attempt.first_token_told = True
            self._commit(fence, attempt)
        else:
            self._emit_refused(fence, attempt, answer)

    def _worked(self, event: on.Stopped | on.Sealed | on.Checked | on.Pulled) -> None:
        match event:
            case on.Sealed():
                attempt = self.table.get(event.key)
                if attempt is None:
                    return
                attempt.mover_busy = False
                if not event.error:
                    self.pool.digested(attempt.blocks, event.key, event.digests)
                if attempt.ending:
                    self._free_if_over(event.key, attempt)
                elif event.error:
                    self._fail(event.key, attempt, FailureKind.FAILURE, FailureReason.PULL_FAILED, event.error)
                else:
                    attempt.sealed = event
                    self._commit(event.key, attempt)
            case on.Checked():
                attempt = self.table.get(event.key)
                if attempt is None:
                    return
                attempt.mover_busy = False
                if attempt.ending:
                    self._free_if_over(event.key, attempt)
                else:
                    self._checked(event.key, attempt, event.digests)
            case on.Stopped():
                attempt = self.table.get(event.key)
                if attempt is not None:
                    self._left_engine(event.key, attempt)
            case _:
                raise TypeError(f"a prefill node cannot take {event!r}")

    def _commit(self, fence: str, attempt: Attempt) -> None:
        grant, sealed = attempt.grant, attempt.sealed
        if grant is None or sealed is None or sealed.location is None or not attempt.first_token_told:
            return
        attempt.phase = Phase.COMMITTING
        commit = Commit(
            uid=attempt.uid,
            attempt=attempt.attempt,
            fence=fence,
            lease_id=grant.lease_id,
            index=attempt.index,
            token=attempt.token,
            logprobs=attempt.logprobs,
            num_tokens=attempt.num_tokens,
            location=sealed.location,
            blocks=attempt.blocks,
            generations=attempt.generations,
            digests=sealed.digests,
            cached_tokens=attempt.cached_tokens(self.config.block_size_tokens),
        )
        self._log("commit", attempt, lease=grant.lease_id)
        self._call(
            grant.decode_address,
            grant.decode_incarnation,
            commit,
            self.config.link_timeout_s,
            partial(self._commit_ended, fence, attempt),
        )

    def _commit_ended(self, fence: str, attempt: Attempt, ended: on.CallEnded) -> None:
        if attempt.ending or attempt.phase is not Phase.COMMITTING:
            return
        if ended.reply is None:
            reason = FailureReason.COMMIT_UNACKNOWLEDGED
            self._fail(fence, attempt, FailureKind.FAILURE, reason, ended.detail, hop=True)
        elif not ended.reply.accepted:
            detail = f"{ended.reply.reason} {ended.reply.detail}".strip()
            kind = FailureKind.OVERLOAD if ended.reply.reason in NOBODYS else FailureKind.FAILURE
            self._fail(fence, attempt, kind, FailureReason.COMMIT_REFUSED, detail, hop=True)
        else:
            attempt.phase = Phase.COMMITTED
            self._await_pull(fence, attempt)

    def _await_pull(self, fence: str, attempt: Attempt) -> None:
        """Longer than any pull that is worth waiting for, and than decode takes to say that it is still activating."""
        attempt.patience += 1
        patience_s = self.config.pull_timeout_s(len(attempt.blocks)) + self.config.link_timeout_s
        self._at(patience_s, partial(self._pull_overdue, fence, attempt, attempt.patience))

    def _pull_overdue(self, fence: str, attempt: Attempt, patience: int) -> None:
        if not attempt.ending and attempt.phase is Phase.COMMITTED and attempt.patience == patience:
            reason = FailureReason.PULL_TIMEOUT
            self._fail(fence, attempt, FailureKind.FAILURE, reason, "decode did not answer", hop=True)

    def _still_activating(self, message: Activating) -> Reply:
        attempt = self._of_lease(message)
        if isinstance(attempt, Reply):
            return attempt
        if attempt.phase is Phase.COMMITTED:
            self._await_pull(message.fence, attempt)
        return ACCEPTED

    def _of_lease(self, message: Activating | PullResult) -> Attempt | Reply:
        """The attempt whose COMMIT went to this lease."""
        attempt = self._known(message)
        if isinstance(attempt, Reply):
            return attempt
        if attempt.grant is None or attempt.grant.lease_id != message.lease_id:
            return refused(Refusal.OTHER_LEASE)
        if attempt.phase not in (Phase.COMMITTING, Phase.COMMITTED):
            return refused(Refusal.WRONG_PHASE, attempt.phase)
        return attempt

    def _pull_ended(self, result: PullResult) -> Reply:
        attempt = self._of_lease(result)
        if isinstance(attempt, Reply):
            return attempt
        if result.activated:
            self._over(result.fence, attempt, "handed over")
        else:  # decode fails the attempt with its lease; so do we: whoever comes first
            reason = result.reason or FailureReason.PULL_FAILED
            self._fail(result.fence, attempt, result.failure, reason, result.detail, hop=True)
        return ACCEPTED

    # ends, holdings and drain

    def _failing(self, key: str, held: Attempt, kind: FailureKind, reason: FailureReason, detail: str) -> None:
        if reason in _KV_IN_DOUBT:  # the next attempt must not start from what may have been at fault
            self.pool.forget(held.blocks)

    def _given(self, answer: HoldingsAnswer) -> Iterable[HeldClaim]:
        return answer.claims

    def _reconsider(self, key: str, held: Attempt, given: HeldClaim | HeldLease) -> None:
        """A grant that does not come is waited for with KV in hand, unless an older request needs the room.

        One attempt yields at a time, and only to a request that found no room from one check to the next.
        """
        older_waits = isinstance(given, HeldClaim) and given.older_waits
        still_waits, held.older_waited = older_waits and held.older_waited, older_waits
        overdue = self._now - held.claimed_at > self.config.grant_timeout_s
        idle = held.phase is Phase.COMPUTED and held.grant is None and not held.ending
        if still_waits and overdue and idle and not any(attempt.yields for attempt in self.table.values()):
            held.yields = True
            self._fail(key, held, FailureKind.OVERLOAD, FailureReason.GRANT_TIMEOUT, "an older request needs the room")

    def _waits(self, answer: HoldingsAnswer) -> bool:
        return answer.queued > 0

    def _drain(self) -> None:
        """Hand back whoever has no grant; the others finish within their own deadlines."""
        for fence, attempt in list(self.table.items()):
            if attempt.grant is None and not attempt.ending:
                self._fail(fence, attempt, FailureKind.OVERLOAD, FailureReason.DRAINING)
