"""What the next step computes. No tensors here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from app.protocol.blocks import blocks_for
from workers.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """A share of a step: ``num_tokens`` tokens of ``sequence`` from position ``start`` on."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last token, so that the next one is drawn from it."""
        return self.end == len(self.sequence.token_ids)


class Scheduler:
    """Continuous batching: every decoding sequence in each step, then prompts in chunks, first come first served.

    At most ``max_num_seqs`` sequences are ``running``, the rest is ``waiting``. ``max_num_batched_tokens`` must
    not be smaller than ``max_num_seqs``, so that decoding never has to leave a sequence out.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, block_size_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size_tokens = block_size_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._admit()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._admit()
        else:
            self.waiting.remove(sequence)

    @property
    def has_work(self) -> bool:
        """Whether the next step would compute anything."""
        return any(self._has_room(sequence) for sequence in self.running)

    def schedule(self) -> list[Chunk]:
        """The next step: one token of each decoding sequence, then prompts under what the budget leaves.

        Among prompts a later one gets only what the earlier ones leave. A sequence whose blocks are full is
        left out until it is given more.
        """
        ready = [sequence for sequence in self.running if self._has_room(sequence)]
        ready.sort(key=lambda sequence: sequence.num_remaining > 1)  # stable: prompts keep their order of arrival
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        for sequence in ready:
            if budget == 0:
                break
            num_tokens = min(sequence.num_remaining, budget)
            chunks.append(Chunk(sequence, sequence.num_computed, num_tokens))
            budget -= num_tokens
        return chunks

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.running.append(self.waiting.popleft())

    def _has_room(self, sequence: Sequence) -> bool:
        return blocks_for(sequence.num_computed + 1, self.block_size_tokens) <= len(sequence.block_table)
