"""The first half of a prefill node's work: claim → stand in line → compute → first token known.

What is claimed stands in line. When the engine is empty the head of the line enters it, as much as one step takes, and
is stamped in the ledger before: if the node dies then, only those may have been what killed it. Known blocks that it
starts from are digested anew by the mover meanwhile: nothing is computed from bytes that are not what was sealed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import takewhile

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.blocks import blocks_for
from app.protocol.commands import (
    Bell,
    Claim,
    ClaimAnswer,
    ClaimStatus,
    Emit,
    EmitAnswer,
    EmitStatus,
    FailureKind,
    Stamp,
    StampAnswer,
    StampStatus,
)
from app.protocol.holding import NodeConfig
from app.protocol.node import LOOK_TRIES, Node
from app.protocol.prefill.attempt import Attempt, Phase
from app.protocol.prefix_cache import PrefixPool, block_keys
from app.protocol.tables import BlockState, FailureReason
from app.schemas import FinishReason

_RING_AGAIN_S = (1.0, 2.0, 4.0)


class Computing(Node[Attempt]):
    """Claims attempts and computes them, one step's worth at a time."""

    queue = "prefill"
    pool: PrefixPool

    def __init__(self, config: NodeConfig, pool: PrefixPool, draw: Callable[[], str]) -> None:
        super().__init__(config, pool, draw)
        self._early: list[on.Called] = []
        """Grants that came before the answer to our claim."""
        self._line: deque[str] = deque()
        """Fences of those that have not entered the engine, in the order of their claims."""

    def gauges(self) -> Mapping[str, int]:
        computing = sum(self._computes(attempt) for attempt in self.table.values())
        return {"running": computing, "waiting": len(self.table) - computing}

    def cache_counts(self) -> Mapping[str, int]:
        return asdict(self.pool.cache)

    @abstractmethod
    def _hand_over(self, fence: str, attempt: Attempt) -> None:
        """Its first token is known: go on if a grant is held."""

    # claim

    def _has_room(self) -> bool:
        return super()._has_room() and not any(attempt.yields for attempt in self.table.values())

    def _ask_for_work(self, bell: on.BellRang) -> None:
        fence = self._draw()
        config = self.config
        at_once = not self._line and not self._engine_busy()
        claim = Claim(bell.uid, config.incarnation, fence, self.pool.free, config.block_size_tokens, stamp=at_once)
        self._ask(claim, partial(self._claimed, bell, claim), tries=LOOK_TRIES)

    def _claimed(self, bell: on.BellRang, claim: Claim, answer: ClaimAnswer | None) -> None:
        self._take(bell, claim, answer)
        early, self._early = self._early, []
        for call in early:
            reply = self._called(call)
            if reply is not None:
                self._reply(call, reply)

    def _take(self, bell: on.BellRang, claim: Claim, answer: ClaimAnswer | None) -> None:
        if answer is None or answer.status is not ClaimStatus.CLAIMED or answer.work is None:
            outcome = "no answer" if answer is None else answer.status.lower()
            self._work_answered(bell, False, outcome, queue_empty=answer is not None and answer.queue_empty)
            return
        work, fence = answer.work, claim.fence
        token_ids, block_size_tokens = (*work.prompt_ids, *work.output_ids), self.config.block_size_tokens
        keys = block_keys(token_ids, block_size_tokens, work.salt) if self.config.prefix_cache else ()
        num_blocks = blocks_for(len(token_ids), block_size_tokens)
        known = self.pool.pin(keys[: num_blocks - 1], fence)  # at least the last token is computed: it gives the logits
        blocks = (*known, *self.pool.take(num_blocks - len(known), fence, BlockState.RUNNING))
        attempt = self.table[fence] = Attempt(
            uid=work.uid,
            client_id=work.client_id,
            attempt=work.attempt,
            fence=fence,
            blocks=blocks,
            generations=self.pool.generations(blocks),
            keys=keys,
            num_cached=len(known),
            bell_id=bell.bell_id,
            work=work,
            claimed_at=self._now,
            stamped=claim.stamp,
        )
        self._log("claimed", attempt, blocks=num_blocks, cached=len(known))
        if self.draining:  # asked before the drain, answered after it
            self._fail(fence, attempt, FailureKind.OVERLOAD, FailureReason.DRAINING)
        else:
            self._line.append(fence)
            self._next_in_line()
            if work.sampling.max_tokens - attempt.index > 1:
                self._ring_decode(fence)
        self._work_answered(bell, True)

    def _ring_decode(self, fence: str) -> None:
        """Ring until a grant is held: 1, 2, 4, then every 4 s."""
        attempt = self.table.get(fence)
        if attempt is None or attempt.grant is not None or attempt.ending:
            return
        self._ring(Bell("decode", attempt.uid, attempt.work.attempt))
        self._at(_RING_AGAIN_S[min(attempt.rings, len(_RING_AGAIN_S) - 1)], partial(self._ring_decode, fence))
        attempt.rings += 1

    # compute

    def _freed(self) -> None:
        self._next_in_line()
        super()._freed()

    @staticmethod
    def _computes(attempt: Attempt) -> bool:
        return attempt.in_engine or (attempt.phase is Phase.COMPUTING and not attempt.ending)

    def _engine_busy(self) -> bool:
        return any(self._computes(attempt) for attempt in self.table.values())

    def _next_in_line(self) -> None:
        """Fill an empty engine with what one step takes, each as soon as the ledger knows that it enters."""
        if not self._line or self._engine_busy():
            return
        budget, begun = self.config.max_num_batched_tokens, set[str]()
        while self._line:
            fence = self._line[0]
            attempt = self.table.get(fence)
            if attempt is None or attempt.ending:
                self._line.popleft()
                continue
            self._pin_more(fence, attempt)
            num_tokens = attempt.num_tokens - attempt.num_computed(self.config.block_size_tokens)
            if num_tokens > budget and budget < self.config.max_num_batched_tokens:
                return
            if 2 * self._saved_by_waiting(attempt, begun) >= num_tokens:
                return
            self._line.popleft()
            budget -= num_tokens
            begun |= set(attempt.keys[attempt.num_cached :])
            attempt.phase = Phase.COMPUTING
            if attempt.num_cached:
                attempt.mover_busy = True
                self._out.append(do.Check(fence, attempt.blocks[: attempt.num_cached]))
            if not attempt.stamped:
                self._ask(self._stamp(attempt, in_step=True), partial(self._stamped, fence, attempt))
            self._start_when_ready(fence, attempt)

    def _saved_by_waiting(self, attempt: Attempt, begun: set[str]) -> int:
        """Tokens that it need not compute if it enters after those about to compute the blocks ``begun``. Where
        that is half of them or more, it waits for that one step."""
        wanted = attempt.keys[attempt.num_cached : len(attempt.blocks) - 1]
        return self.config.block_size_tokens * sum(1 for _ in takewhile(begun.__contains__, wanted))

    def _pin_more(self, fence: str, attempt: Attempt) -> None:
        """What was computed while it stood in line, it need not compute itself: its own blocks for that come free."""
        keys = attempt.keys[: len(attempt.blocks) - 1]
        known = self.pool.pin(keys[attempt.num_cached :], fence)
        if not known:
            return
        first, attempt.num_cached = attempt.num_cached, attempt.num_cached + len(known)
        self.pool.give_back(attempt.blocks[first : attempt.num_cached], fence)
        attempt.blocks = (*attempt.blocks[:first], *known, *attempt.blocks[attempt.num_cached :])
        attempt.generations = self.pool.generations(attempt.blocks)
        super()._freed()

    def _stamp(self, attempt: Attempt, *, in_step: bool) -> Stamp:
        return Stamp(attempt.uid, attempt.attempt, attempt.fence, self.config.incarnation, in_step)

    def _stamped(self, fence: str, attempt: Attempt, answer: StampAnswer) -> None:
        if attempt.ending:
            return
        if answer.status is StampStatus.OK:
            attempt.stamped = True
            self._start_when_ready(fence, attempt)
        else:
            self._over(fence, attempt, answer.status.lower())

    def _checked(self, fence: str, attempt: Attempt, digests: tuple[str, ...]) -> None:
        """The mover has read the known blocks: from the first that has changed on, all is computed anew."""
        num_intact = self.pool.intact(attempt.blocks[: attempt.num_cached], digests)
        if num_intact < attempt.num_cached:
            self._drop_known(fence, attempt, num_intact)
        if not attempt.ending:
            self._start_when_ready(fence, attempt)

    def _drop_known(self, fence: str, attempt: Attempt, num_intact: int) -> None:
        """Known blocks after the first ``num_intact`` are known no more; blocks of its own take their place. Others
        may still hold those that were dropped: then there may be no room for that here, through nobody's fault."""
        before, dropped = attempt.blocks[:num_intact], attempt.blocks[num_intact : attempt.num_cached]
        after = attempt.blocks[attempt.num_cached :]
        self._log("cached KV corrupted", attempt, "error", block=dropped[0], dropped=len(dropped))
        self.pool.cache.corrupted_blocks += 1
        self.pool.forget(dropped)
        self.pool.give_back(dropped, fence)
        fits = len(dropped) <= self.pool.free
        own = self.pool.take(len(dropped), fence, BlockState.RUNNING) if fits else ()
        attempt.blocks, attempt.num_cached = (*before, *own, *after), num_intact
        attempt.generations = self.pool.generations(attempt.blocks)
        if not fits:
            detail = "cached KV was corrupted, and there is no room to compute it anew"
            self._fail(fence, attempt, FailureKind.OVERLOAD, FailureReason.ENGINE_ERROR, detail)

    def _start_when_ready(self, fence: str, attempt: Attempt) -> None:
        if attempt.stamped and not attempt.mover_busy:
            self._start(fence, attempt)

    def _start(self, fence: str, attempt: Attempt) -> None:
        attempt.in_engine = True
        num_computed = attempt.num_computed(self.config.block_size_tokens)
        self.pool.cache.started(attempt.num_tokens, num_computed)
        self._out.append(do.Start(fence, attempt.work, attempt.blocks, num_computed, one_token=True))

    def _left_engine(self, fence: str, attempt: Attempt) -> None:
        attempt.in_engine = False
        self._free_if_over(fence, attempt)
        self._next_in_line()

    def _sampled(self, sample: on.Sample) -> None:
        attempt = self.table.get(sample.key)
        if attempt is None or not attempt.in_engine:
            return
        attempt.in_engine = False
        if sample.tokens:
            self._publish(sample.key, attempt)
        if attempt.ending:
            self._free_if_over(sample.key, attempt)
        elif sample.error:
            self._fail(sample.key, attempt, sample.failure, FailureReason.ENGINE_ERROR, sample.error)
        elif sample.finish_reason is not None:
            self._end_with(sample.key, attempt, sample, sample.finish_reason)
        else:
            self._log(
                "prefilled",
                attempt,
                tokens=attempt.num_tokens,
                engine_ms=round(1000 * sample.engine_s),
                cached_tokens=attempt.num_computed(self.config.block_size_tokens),
            )
            attempt.token, attempt.logprobs = sample.token, sample.logprobs
            attempt.phase = Phase.COMPUTED
            self._hand_over(sample.key, attempt)
            if attempt.phase is Phase.COMPUTED:
                # It may wait for long, and no step can hurt it any more. If this is lost, a loss counts as a failure.
                self._ask(self._stamp(attempt, in_step=False), self._whatever, tries=0)
        self._next_in_line()

    def _publish(self, fence: str, attempt: Attempt) -> None:
        """A step has computed all of it without an error: its full blocks are known from now on. They are digested at
        once, before it lets go of them: who starts from them later compares. That it may need to hand them over."""
        self.pool.move(attempt.blocks[attempt.num_cached :], fence, BlockState.HELD)
        self.pool.publish(attempt.blocks, fence, attempt.keys)
        attempt.mover_busy = True
        known = self.pool.digests(attempt.blocks)
        self._out.append(do.Seal(fence, attempt.blocks, attempt.generations, known))

    def _end_with(self, fence: str, attempt: Attempt, sample: on.Sample, finish: FinishReason) -> None:
        """The first token ends the answer: tokens and end in one step (rule 8), no grant needed."""
        attempt.ending = attempt.finishing = True
        emit = self._emit(attempt, sample.tokens, sample.all_logprobs, finish)
        self._ask(emit, partial(self._ended, fence, attempt))

    def _emit(
        self,
        attempt: Attempt,
        tokens: tuple[int, ...],
        logprobs: tuple[str, ...],
        finish: FinishReason | None = None,
    ) -> Emit:
        incarnation = self.config.incarnation
        return Emit(
            attempt.uid,
            attempt.attempt,
            attempt.fence,
            incarnation,
            attempt.index,
            tokens,
            finish,
            logprobs,
            cached_tokens=attempt.cached_tokens(self.config.block_size_tokens),
        )

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
