"""The second half: decode, tell each token, the last one and the end in one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Emit, EmitAnswer, EmitStatus, FailureKind, HeldLease, HoldingsAnswer
from app.protocol.decode.growth import Growing
from app.protocol.decode.lease import Lease, Phase
from app.protocol.tables import BlockState, FailureReason


class DecodeNode(Growing):
    """The decode side of the protocol.

    It alone writes its own KV blocks (rule 5). Blocks in PULLING or IN_STEP become free only when the mover or the
    engine says that it has stopped; every other wait ends by an answer of the ledger or by a deadline.
    """

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

    def _engine_stopped(self, lease_id: str, lease: Lease) -> None:
        self._left_engine(lease_id, lease)
        self._resume_if_told(lease_id, lease)

    def _sampled(self, sample: on.Sample) -> None:
        lease = self.table.get(sample.key)
        if lease is None or not lease.in_engine:
            return
        if sample.error or sample.finish_reason is not None:
            self._left_engine(sample.key, lease)
        if lease.ending:
            return
        if sample.error:
            self._fail(sample.key, lease, sample.failure, FailureReason.ENGINE_ERROR, sample.error)
            return
        if sample.index != len(lease.output):
            detail = f"the engine sampled index {sample.index}, {len(lease.output)} was next"
            self._fail(sample.key, lease, FailureKind.FAILURE, FailureReason.ENGINE_ERROR, detail)
            return
        lease.output.extend(sample.tokens)
        lease.logprobs.extend(sample.all_logprobs)
        lease.finish = sample.finish_reason
        self._emit(sample.key, lease)
        if len(lease.output) - lease.told_length > self.config.emit_buffer_tokens:
            self._stop(sample.key, lease)  # the ledger is away: pause until it has caught up
        self._grow(sample.key, lease)

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
            tuple(lease.logprobs[lease.told_length :]),
            len(lease.blocks) if len(lease.blocks) != lease.told_blocks else 0,
            cached_tokens=lease.commit.cached_tokens if lease.commit is not None else 0,
        )
        self._ask(emit, partial(self._emitted, lease_id, lease, emit))

    def _emitted(self, lease_id: str, lease: Lease, emit: Emit, answer: EmitAnswer) -> None:
        if lease.ending:
            return
        lease.emitting = False
        match answer.status:
            case EmitStatus.OK | EmitStatus.SAME:
                lease.told_length = max(lease.told_length, emit.index + len(emit.tokens))
                lease.told_blocks = emit.blocks or lease.told_blocks
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
        """A paused sequence goes on once the ledger holds all of its tokens, and it has room for the next."""
        paused = lease.phase is Phase.RUNNING and not lease.ending and not lease.in_engine and lease.finish is None
        if not paused or lease.told_length != len(lease.output):
            return
        if self._is_short(lease):
            self._make_room()
        else:
            self._enter_engine(lease_id, lease)

    # holdings and drain

    def _failing(self, key: str, held: Lease, kind: FailureKind, reason: FailureReason, detail: str) -> None:
        if held.phase in (Phase.PULLING, Phase.ACTIVATING):
            self._tell_not_activated(key, held, kind, reason, detail)

    def _decides_itself(self, held: Lease) -> bool:
        return held.ending or (held.finish is not None and held.emitting)

    def _given(self, answer: HoldingsAnswer) -> Iterable[HeldLease]:
        return answer.leases

    def _waits(self, answer: HoldingsAnswer) -> bool:
        return answer.waiting_for_grant > 0

    def _drain(self) -> None:
        """Running sequences and granted leases finish; nothing new is reserved."""
