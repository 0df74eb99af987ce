"""A node's make-believe engine: continuous batching with chunked prefill over the blocks that sequences bring.

A step reads and writes KV when it ends, as late as a real one may, and looks at its inbox only between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.tables import BlockState
from app.schemas import FinishReason, SamplingParams
from tests.sim.model import BLOCK_TOKENS, EOS, NOTHING_YET, kv_of, logprobs_of, next_token, other_token
from tests.sim.process import Part

if TYPE_CHECKING:
    from tests.sim.node import KVNode

_MAY_WRITE = (BlockState.RUNNING, BlockState.IN_STEP)


@dataclass(slots=True)
class Sequence:
    """What the engine works on."""

    job: do.Start
    tokens: list[int]
    num_computed: int
    table: list[int]
    """Its blocks; those that it got later too."""

    @property
    def has_room(self) -> bool:
        """Whether its blocks hold one more position."""
        return self.num_computed < BLOCK_TOKENS * len(self.table)


Chunk = tuple[Sequence, int]
"""A sequence, and up to which position this step computes it."""


class Engine(Part):
    """At most ``max_num_seqs`` sequences take part in steps of ``max_num_batched_tokens``; the rest waits."""

    process: KVNode

    def __init__(self, node: KVNode, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.process = node
        self.entered_at: float | None = None
        """When the running step began; what the watchdog looks at."""
        self.stuck = False
        """A step that begins now never ends."""
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._inbox: list[do.Start | do.Extend | do.Stop] = []
        self._sequences: dict[str, Sequence] = {}
        self._looking = False

    def put(self, job: do.Start | do.Extend | do.Stop) -> None:
        """Hand over a sequence to add or to drop, or more blocks for one."""
        self._inbox.append(job)
        if self.entered_at is None and not self._looking:
            self._looking = True
            self.after(self.process.world.pace.thread(), self._between_steps)

    def get_stuck(self) -> None:
        """The running step, or the next one, never ends."""
        self.stuck = True

    def _between_steps(self) -> None:
        self._looking = False
        if self.entered_at is not None:
            return  # a step has begun meanwhile
        inbox, self._inbox = self._inbox, []
        for job in inbox:
            if isinstance(job, do.Stop):
                self._sequences.pop(job.key, None)
                self.process.post(on.Stopped(job.key))
            elif isinstance(job, do.Extend):
                if job.key in self._sequences:  # else it has ended meanwhile
                    self._sequences[job.key].table += job.blocks
            else:
                self._add(job)
        chunks = self._schedule()
        if chunks:
            world = self.process.world
            self.entered_at = world.timeline.now
            num_tokens = sum(end - sequence.num_computed for sequence, end in chunks)
            if not self.stuck:
                self.after(world.pace.step(num_tokens), self._step_ends, chunks)

    def _add(self, job: do.Start) -> None:
        work = job.work
        finish = _finish_reason(work.output_ids, work.sampling)
        if finish is not None:  # a rollback has lost the end of a whole answer
            self.process.post(on.Stepped((on.Sample(job.key, len(work.output_ids), on.NO_TOKEN, finish),)))
            return
        tokens = [*work.prompt_ids, *work.output_ids]
        if job.one_token:
            self.process.check_starts(job, tokens)
        self._sequences[job.key] = Sequence(job, tokens, job.num_computed, list(job.blocks))

    def _schedule(self) -> list[Chunk]:
        """One token of each decoding sequence, then prompts, first come first served, within the budget. Whose blocks
        are full waits for more."""
        running = [one for one in list(self._sequences.values())[: self._max_num_seqs] if one.has_room]
        running.sort(key=_is_prompt)
        budget = self._budget
        chunks = []
        for sequence in running:
            num_tokens = min(len(sequence.tokens) - sequence.num_computed, budget)
            if num_tokens:
                budget -= num_tokens
                chunks.append((sequence, sequence.num_computed + num_tokens))
        return chunks

    def _step_ends(self, chunks: list[Chunk]) -> None:
        if self.stuck:
            return
        self.entered_at = None
        node = self.process
        samples = []
        for sequence, end in chunks:
            if node.world.faults.kills_its_node(sequence.job.work.uid):
                node.crash("computing a poison prompt")
                return
            self._write(sequence, end)
            if end == len(sequence.tokens):
                samples.append(self._sample(sequence))
        if samples:
            node.post(on.Stepped(tuple(samples)))
        self._between_steps()

    def _write(self, sequence: Sequence, end: int) -> None:
        """Compute the KV of the next positions from what the blocks hold before them."""
        node, memory = self.process, self.process.memory
        table, key = sequence.table, sequence.job.key
        start = sequence.num_computed
        for block in table[start // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]:
            node.check_writes(block, key, _MAY_WRITE)
            memory.salts[block] = sequence.job.work.salt
        before = NOTHING_YET
        if start:
            before = memory.blocks[table[(start - 1) // BLOCK_TOKENS]][(start - 1) % BLOCK_TOKENS]
        for position in range(start, end):
            before = kv_of(before, sequence.tokens[position])
            memory.blocks[table[position // BLOCK_TOKENS]][position % BLOCK_TOKENS] = before
        sequence.num_computed = end
        node.world.computed_from.setdefault(key, start)

    def _sample(self, sequence: Sequence) -> on.Sample:
        job, memory = sequence.job, self.process.memory
        sampling = job.work.sampling
        index = len(sequence.tokens) - len(job.work.prompt_ids)
        world = self.process.world
        if world.faults.breaks_sequence(self.process.name, job.work.uid):
            del self._sequences[job.key]
            error = "the engine cannot compute this sequence"
            return on.Sample(job.key, index, on.NO_TOKEN, error=error, retry_helps=world.faults.coin())
        held = list(chain.from_iterable([memory.blocks[block] for block in sequence.table]))
        token = next_token(held[: len(sequence.tokens)], sampling.seed, index)
        if world.faults.ties(self.process.name, job.work.uid):
            token = other_token(token)
        sequence.tokens.append(token)
        finish = _finish_reason(sequence.tokens[len(job.work.prompt_ids) :], sampling)
        if finish is not None or job.one_token:
            del self._sequences[job.key]
        logprobs = "" if sampling.logprobs is None else logprobs_of(token, index)
        return on.Sample(job.key, index, token, finish, logprobs=logprobs)


def _finish_reason(output: Sequence_[int], sampling: SamplingParams) -> FinishReason | None:
    """Whether an answer with this output is whole."""
    if output and output[-1] == EOS and not sampling.ignore_eos:
        return "stop"
    return "length" if len(output) >= sampling.max_tokens else None


def _is_prompt(sequence: Sequence) -> bool:
    return len(sequence.tokens) - sequence.num_computed > 1
