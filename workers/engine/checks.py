"""What the engine refuses, before it changes anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.errors import EngineError, StartupError
from app.protocol.blocks import blocks_for
from workers.engine.sequence import Sequence

if TYPE_CHECKING:
    from app.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SequenceChecks:
    """The limits of one engine."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size_tokens: int

    def check_tokens(self, sequence: Sequence) -> None:
        """Raise ``EngineError`` if an undisturbed run of this engine cannot have come to ``sequence``."""
        key, num_tokens = sequence.key, len(sequence.token_ids)
        if not sequence.prompt_ids:
            raise EngineError(f"sequence {key} has an empty prompt")
        if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= self.vocab_size:
            raise EngineError(f"sequence {key} has token ids outside the vocabulary of {self.vocab_size}")
        named = [*sequence.sampling.stop_token_ids, *(token_id for token_id, _ in sequence.sampling.logit_bias)]
        if max(named, default=0) >= self.vocab_size:
            raise EngineError(f"sequence {key} names a token outside the vocabulary of {self.vocab_size}")
        if len(sequence.output_ids) > sequence.sampling.max_tokens:
            raise EngineError(f"sequence {key} has more than its max_tokens={sequence.sampling.max_tokens}")
        before_the_last = num_tokens - 1 if sequence.output_ids else num_tokens
        if before_the_last >= self.max_model_len:
            raise EngineError(
                f"sequence {key} has {num_tokens} tokens, max_model_len={self.max_model_len} leaves no room"
            )

    def check_room(self, sequence: Sequence) -> None:
        """Raise ``EngineError`` if the next token of ``sequence`` cannot be computed; the message says why."""
        key, num_tokens = sequence.key, len(sequence.token_ids)
        if not 0 <= sequence.num_computed < num_tokens:
            raise EngineError(f"sequence {key}: num_computed={sequence.num_computed} must be in 0..{num_tokens - 1}")
        needed = blocks_for(num_tokens, self.block_size_tokens)
        if len(sequence.block_table) < needed:
            raise EngineError(
                f"sequence {key} needs {needed} blocks for {num_tokens} tokens, got {len(sequence.block_table)}"
            )
        self.check_blocks(key, sequence.block_table)

    def check_blocks(self, key: str, blocks: list[int]) -> None:
        """Raise ``EngineError`` unless ``blocks`` are distinct blocks of the pool."""
        if len(set(blocks)) != len(blocks) or min(blocks) < 0 or max(blocks) >= self.num_blocks:
            raise EngineError(f"sequence {key}: blocks must be distinct and in 0..{self.num_blocks - 1}: {blocks}")


def check_limits(
    block_size_tokens: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, config: ModelConfig
) -> None:
    """Raise ``StartupError`` if an engine with these limits could not work; the message names the value."""
    if block_size_tokens < 1 or max_num_seqs < 1:
        raise StartupError(f"block_size_tokens={block_size_tokens} and max_num_seqs={max_num_seqs} must be at least 1")
    if max_num_batched_tokens < max_num_seqs:
        raise StartupError(
            f"max_num_batched_tokens={max_num_batched_tokens} must not be below max_num_seqs={max_num_seqs}"
        )
    if not 2 <= max_model_len <= config.max_context_tokens:
        raise StartupError(
            f"max_model_len={max_model_len} must be in 2..{config.max_context_tokens}, what the model was made for"
        )
