"""The prefill node: claim → compute → (grant held) → first token and seal → COMMIT → pull acknowledged → blocks free.

Owner of the attempt from ``claim`` to ``activate``. It owns the deadline for a grant: it rings ``decode`` again after
1, 2, 4, then every 4 s, so that a lost bell or a dead decode node costs seconds, not a timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.blocks import BlockPool, blocks_for
from app.protocol.commands import (
    Bell,
    Claim,
    ClaimAnswer,
    ClaimStatus,
    Emit,
    EmitAnswer,
    EmitStatus,
    FailureKind,
    HeldClaim,
    HeldLease,
    HoldingsAnswer,
    Work,
)
from app.protocol.holding import Held, NodeConfig
from app.protocol.messages import ACCEPTED, Commit, Grant, Message, PullResult, Refusal, Reply, refused
from app.protocol.node import LOOK_TRIES, Node
from app.protocol.tables import BlockState, FailureReason
from app.schemas import FinishReason

_RING_AGAIN_S = (1.0, 2.0, 4.0)


class Phase(StrEnum):
    """Where a claimed attempt stands on the prefill node."""

    COMPUTING = "computing"
    COMPUTED = "computed"  # first token known; waits for a grant
    SEALING = "sealing"  # first token on its way to the ledger, blocks being digested
    COMMITTING = "committing"  # COMMIT sent
    COMMITTED = "committed"  # receipt acknowledged; the result of the pull is awaited


@dataclass(slots=True, kw_only=True)
class Attempt(Held):
    """One claimed attempt. Keyed by its fence, which this node drew."""

    work: Work
    generations: tuple[int, ...]
    """Of ``blocks``, as they were taken (rule 6)."""
    claimed_at: float
    phase: Phase = Phase.COMPUTING
    grant: Grant | None = None
    rings: int = 0
    token: int = -1
    first_token_told: bool = False
    sealed: on.Sealed | None = None
    finishing: bool = False
    """Its first token ends the answer; tokens and end are on their way to the ledger."""
    older_waited: bool = False
    """At the last check a request that was admitted earlier was QUEUED."""
    yields: bool = False
    """Given up so that an older request can have the room: nothing is claimed before its blocks are free."""

    @property
    def index(self) -> int:
        """Index in the answer of the token this attempt samples."""
        return len(self.work.output_ids)

    @property
    def num_tokens(self) -> int:
        """Positions whose KV this attempt computes."""
        return len(self.work.prompt_ids) + len(self.work.output_ids)


class PrefillNode(Node[Attempt]):
    """The prefill side of the protocol."""

    queue = "prefill"

    def __init__(self, config: NodeConfig, pool: BlockPool, draw: Callable[[], str]) -> None:
        super().__init__(config, pool, draw)
        self._early: list[on.Called] = []
        """Grants that came before the answer to our claim."""

    def gauges(self) -> Mapping[str, int]:
        computing = sum(attempt.in_engine for attempt in self.table.values())
        return {"running": computing, "waiting": len(self.table) - computing}

    # claim

    def _has_room(self) -> bool:
        return super()._has_room() and not any(attempt.yields for attempt in self.table.values())

    def _ask_for_work(self, bell: on.BellRang) -> None:
        fence = self._draw()
        claim = Claim(bell.uid, self.config.incarnation, fence, self.pool.free, self.config.block_size_tokens)
        self._ask(claim, lambda answer: self._claimed(bell, fence, answer), tries=LOOK_TRIES)

    def _claimed(self, bell: on.BellRang, fence: str, answer: ClaimAnswer | None) -> None:
        self._take(bell, fence, answer)
        early, self._early = self._early, []
        for call in early:
            reply = self._called(call)
            if reply is not None:
                self._reply(call, reply)

    def _take(self, bell: on.BellRang, fence: str, answer: ClaimAnswer | None) -> None:
        if answer is None or answer.status is not ClaimStatus.CLAIMED or answer.work is None:
            self._work_answered(bell, False, "no answer" if answer is None else answer.status.lower())
            return
        work = answer.work
        num_blocks = blocks_for(len(work.prompt_ids) + len(work.output_ids), self.config.block_size_tokens)
        blocks = self.pool.take(num_blocks, fence, BlockState.RUNNING)
        attempt = self.table[fence] = Attempt(
            uid=work.uid,
            client_id=work.client_id,
            attempt=work.attempt,
            fence=fence,
            blocks=blocks,
            generations=self.pool.generations(blocks),
            bell_id=bell.bell_id,
            work=work,
            claimed_at=self._now,
        )
        self._log("claimed", attempt, blocks=num_blocks)
        finish = self._already_ended(work)
        if self.draining:  # asked before the drain, answered after it
            self._fail(fence, attempt, FailureKind.OVERLOAD, FailureReason.DRAINING)
        elif finish:
            self._end_with(fence, attempt, (), finish)
        else:
            attempt.in_engine = True
            self._out.append(do.Start(fence, work, attempt.blocks, num_computed=0, one_token=True))
            if work.sampling.max_tokens - attempt.index > 1:
                self._ring_decode(fence)
        self._work_answered(bell, True)

    def _already_ended(self, work: Work) -> str:
        """A resumed attempt whose tokens already end the answer (their end was lost in a rollback)."""
        if len(work.output_ids) >= work.sampling.max_tokens:
            return "length"
        ended = bool(work.output_ids) and work.output_ids[-1] in self.config.eos_token_ids
        return "stop" if ended and not work.sampling.ignore_eos else ""

    def _ring_decode(self, fence: str) -> None:
        """Ring until a grant is held: 1, 2, 4, then every 4 s."""
        attempt = self.table.get(fence)
        if attempt is None or attempt.grant is not None or attempt.ending:
            return
        self._ring(Bell("decode", attempt.uid, attempt.work.attempt))
        self._at(_RING_AGAIN_S[min(attempt.rings, len(_RING_AGAIN_S) - 1)], lambda: self._ring_decode(fence))
        attempt.rings += 1

    # compute

    def _sampled(self, sample: on.Sample) -> None:
        attempt = self.table.get(sample.key)
        if attempt is None or not attempt.in_engine:
            return
        attempt.in_engine = False
        if attempt.ending:
            self._free_if_over(sample.key, attempt)
        elif sample.error:
            self._fail(sample.key, attempt, FailureKind.FAILURE, FailureReason.ENGINE_ERROR, sample.error)
        elif sample.finish_reason is not None:
            self._end_with(sample.key, attempt, (sample.token,), sample.finish_reason)
        else:
            self._log("prefilled", attempt, tokens=attempt.num_tokens, engine_ms=round(1000 * sample.engine_s))
            self.pool.move(attempt.blocks, sample.key, BlockState.HELD)
            attempt.token = sample.token
            attempt.phase = Phase.COMPUTED
            self._hand_over(sample.key, attempt)

    def _end_with(self, fence: str, attempt: Attempt, tokens: tuple[int, ...], finish: str) -> None:
        """The first token ends the answer: tokens and end in one step (rule 8), no grant needed."""
        attempt.ending = attempt.finishing = True
        emit = self._emit(attempt, tokens, "length" if finish == "length" else "stop")
        self._ask(emit, lambda answer: self._ended(fence, attempt, answer))

    def _emit(self, attempt: Attempt, tokens: tuple[int, ...], finish: FinishReason | None = None) -> Emit:
        incarnation = self.config.incarnation
        return Emit(attempt.uid, attempt.attempt, attempt.fence, incarnation, attempt.index, tokens, finish)

    def _ended(self, fence: str, attempt: Attempt, answer: EmitAnswer) -> None:
        if answer.status in (EmitStatus.OK, EmitStatus.SAME):
            self._over(fence, attempt, "finished")
        else:
            self._emit_refused(fence, attempt, answer)

    def _emit_refused(self, fence: str, attempt: Attempt, answer: EmitAnswer) -> None:
        if answer.status in (EmitStatus.DIFFERENT, EmitStatus.GAP):
            detail = f"the ledger answers {answer.status} at index {attempt.index}"
            self._fail(fence, attempt, FailureKind.FINAL, FailureReason.DIFFERENT_TOKENS, detail)
        else:
            self._over(fence, attempt, answer.status.lower())

    # hand over

    def _called(self, call: on.Called) -> Reply | None:
        message = call.message
        if isinstance(message, Grant):
            if message.fence not in self.table and self._asking_for_work:
                self._early.append(call)  # our claim may have been applied; its answer decides
                return None
            return self._granted(message)
        if isinstance(message, PullResult):
            return self._pull_ended(message)
        return refused(Refusal.WRONG_ROLE, message.kind)

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
        """Prefill done and grant held: tell the first token, digest the blocks; COMMIT when both are done."""
        if attempt.ending or attempt.phase is not Phase.COMPUTED or attempt.grant is None:
            return
        attempt.phase = Phase.SEALING
        attempt.mover_busy = True
        emit = self._emit(attempt, (attempt.token,))
        # Asked once: where its outcome is unknown, ``activate`` writes the token if the ledger lost it.
        self._ask(emit, lambda answer: self._first_token_told(fence, attempt, answer), tries=0)
        self._out.append(do.Seal(fence, attempt.blocks, attempt.generations))

    def _first_token_told(self, fence: str, attempt: Attempt, answer: EmitAnswer | None) -> None:
        if attempt.ending:
            return
        if answer is None or answer.status in (EmitStatus.OK, EmitStatus.SAME, EmitStatus.LATE):
            attempt.first_token_told = True
            self._commit(fence, attempt)
        else:
            self._emit_refused(fence, attempt, answer)

    def _worked(self, event: on.Stopped | on.Sealed | on.Pulled) -> None:
        match event:
            case on.Sealed():
                attempt = self.table.get(event.key)
                if attempt is None:
                    return
                attempt.mover_busy = False
                if attempt.ending:
                    self._free_if_over(event.key, attempt)
                elif event.error:
                    self._fail(event.key, attempt, FailureKind.FAILURE, FailureReason.PULL_FAILED, event.error)
                else:
                    attempt.sealed = event
                    self._commit(event.key, attempt)
            case on.Stopped():
                attempt = self.table.get(event.key)
                if attempt is not None:
                    attempt.in_engine = False
                    self._free_if_over(event.key, attempt)
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
            num_tokens=attempt.num_tokens,
            location=sealed.location,
            blocks=attempt.blocks,
            generations=attempt.generations,
            digests=sealed.digests,
        )
        self._log("commit", attempt, lease=grant.lease_id)
        self._call(
            grant.decode_address,
            grant.decode_incarnation,
            commit,
            self.config.link_timeout_s,
            lambda ended: self._commit_ended(fence, attempt, ended),
        )

    def _commit_ended(self, fence: str, attempt: Attempt, ended: on.CallEnded) -> None:
        if attempt.ending or attempt.phase is not Phase.COMMITTING:
            return
        if ended.reply is None:
            self._fail(fence, attempt, FailureKind.FAILURE, FailureReason.COMMIT_UNACKNOWLEDGED, ended.detail)
        elif not ended.reply.accepted:
            detail = f"{ended.reply.reason} {ended.reply.detail}".strip()
            kind = FailureKind.OVERLOAD if ended.reply.reason is Refusal.HANDED_BACK else FailureKind.FAILURE
            self._fail(fence, attempt, kind, FailureReason.COMMIT_REFUSED, detail)
        else:
            attempt.phase = Phase.COMMITTED
            # Longer than decode's own deadline, so that decode's answer comes first.
            patience = self.config.pull_timeout_s(len(attempt.blocks)) + self.config.link_timeout_s
            self._at(patience, lambda: self._pull_overdue(fence, attempt))

    def _pull_overdue(self, fence: str, attempt: Attempt) -> None:
        if not attempt.ending and attempt.phase is Phase.COMMITTED:
            self._fail(fence, attempt, FailureKind.FAILURE, FailureReason.PULL_TIMEOUT, "decode did not answer")

    def _pull_ended(self, result: PullResult) -> Reply:
        attempt = self._known(result)
        if isinstance(attempt, Reply):
            return attempt
        if attempt.grant is None or attempt.grant.lease_id != result.lease_id:
            return refused(Refusal.OTHER_LEASE)
        if attempt.phase not in (Phase.COMMITTING, Phase.COMMITTED):
            return refused(Refusal.WRONG_PHASE, attempt.phase)
        if result.activated:
            self._over(result.fence, attempt, "handed over")
        else:  # decode fails the attempt with its lease; so do we: whoever comes first
            detail = f"{result.reason} {result.detail}".strip()
            kind = FailureKind.OVERLOAD if result.reason == FailureReason.DRAINING else FailureKind.FAILURE
            self._fail(result.fence, attempt, kind, FailureReason.PULL_FAILED, detail)
        return ACCEPTED

    # holdings and drain

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
