"""The index arrays of one step, in numpy: where each token's KV goes, and whose KV each query reads.

A *row* is the K (or V) of one token, counted from the layer's first row: the rows of block ``b`` start at
``b * row_stride``, so the same indexes serve every layer and both K and V (see ``kv_cache``).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from app.protocol.blocks import blocks_for
from workers.engine.scheduler import Chunk

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Tokens are ragged and flat: decode queries first, by length, then the prompts' chunks."""

    chunks: tuple[Chunk, ...]
    token_ids: Ints
    """[T]"""
    positions: Ints
    """[T]"""
    write_rows: Ints
    """[T]: where each token's K and V go."""
    spans: npt.NDArray[np.int32]
    """[len(chunks), 4]: first token in the step, tokens, position of the first, begin of its blocks in ``tables``."""
    tables: npt.NDArray[np.int32]
    """The blocks of all chunks' sequences, up to the chunks' ends."""
    sample_tokens: Ints
    """Index in the batch of each token from which a next one is drawn; order of ``sampling_chunks``."""

    @property
    def sampling_chunks(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.samples]


def build_batch(chunks: Sequence_[Chunk], *, block_size_tokens: int, row_stride: int) -> Batch:
    """Lay out the chunks of a step. ``row_stride``: rows between the starts of two blocks."""
    singles = sorted((chunk for chunk in chunks if chunk.num_tokens == 1), key=lambda chunk: chunk.end)
    ordered = (*singles, *(chunk for chunk in chunks if chunk.num_tokens > 1))
    tables = [chunk.sequence.block_table[: blocks_for(chunk.end, block_size_tokens)] for chunk in ordered]
    counts = np.asarray([chunk.num_tokens for chunk in ordered], np.int64)
    starts = np.asarray([chunk.start for chunk in ordered], np.int64)
    ends = np.cumsum(counts)
    table_ends = np.cumsum([len(table) for table in tables])
    table_starts = table_ends - [len(table) for table in tables]
    flat_tables = np.fromiter(chain.from_iterable(tables), np.int64, int(table_ends[-1]))
    positions = np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    blocks = flat_tables[np.repeat(table_starts, counts) + positions // block_size_tokens]
    return Batch(
        chunks=ordered,
        token_ids=np.concatenate([np.asarray(c.sequence.token_ids[c.start : c.end], np.int64) for c in ordered]),
        positions=positions,
        write_rows=blocks * row_stride + positions % block_size_tokens,
        spans=np.stack([ends - counts, counts, starts, table_starts], axis=1).astype(np.int32),
        tables=flat_tables.astype(np.int32),
        sample_tokens=np.asarray([end - 1 for end, c in zip(ends, ordered, strict=True) if c.samples], np.int64),
    )
