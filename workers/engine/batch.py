"""The index arrays of one step, in numpy: where each token's KV goes, and which KV each query reads.

A *row* is the K (or V) of one token, counted from the layer's first row: the rows of block ``b`` start at
``b * row_stride``, so the same indexes serve every layer and both K and V (see ``kv_cache``).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.engine.scheduler import Chunk

Ints = npt.NDArray[np.int64]

TILE_TOKENS = 64
"""Queries per piece of prefill attention: scores of 9 heads x 64 x 2048 stay in the cache (half the time of 128)."""
MAX_PADDING = 1.5
"""A decode group reads at most this many times the rows that its sequences have."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token queries ``first:first + len(lengths)`` of the batch, padded to ``max(lengths)`` rows."""

    first: int
    lengths: Ints
    """[n]: how many rows each query reads, its own included."""
    rows: Ints
    """[n, max(lengths)]; the padding repeats the sequence's first row, so that nobody reads a neighbour's."""


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Queries ``first:first + num_tokens`` of the batch: consecutive tokens of one sequence, up to position ``end``."""

    first: int
    num_tokens: int
    rows: Ints
    """[end]: the rows of all tokens up to the piece's last."""


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
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillPiece, ...]
    sample_tokens: Ints
    """Index in the batch of each token from which a next one is drawn; order of ``sampling_chunks``."""

    @property
    def sampling_chunks(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.samples]


def build_batch(chunks: Sequence_[Chunk], *, block_size_tokens: int, row_stride: int) -> Batch:
    """Lay out the chunks of a step. ``row_stride``: rows between the starts of two blocks."""
    singles = sorted((chunk for chunk in chunks if chunk.num_tokens == 1), key=lambda chunk: chunk.end)
    ordered = (*singles, *(chunk for chunk in chunks if chunk.num_tokens > 1))
    offsets = np.arange(block_size_tokens, dtype=np.int64)
    rows = [
        (np.asarray(chunk.sequence.block_table, np.int64)[:, None] * row_stride + offsets).reshape(-1)[: chunk.end]
        for chunk in ordered
    ]
    ends = np.cumsum([chunk.num_tokens for chunk in ordered])
    prefills: list[PrefillPiece] = []
    for chunk, own_rows, last in zip(ordered[len(singles) :], rows[len(singles) :], ends[len(singles) :], strict=True):
        for done in range(0, chunk.num_tokens, TILE_TOKENS):
            num_tokens = min(TILE_TOKENS, chunk.num_tokens - done)
            first = int(last) - chunk.num_tokens + done
            prefills.append(PrefillPiece(first, num_tokens, own_rows[: chunk.start + done + num_tokens]))
    return Batch(
        chunks=ordered,
        token_ids=np.concatenate([np.asarray(c.sequence.token_ids[c.start : c.end], np.int64) for c in ordered]),
        positions=np.concatenate([np.arange(c.start, c.end, dtype=np.int64) for c in ordered]),
        write_rows=np.concatenate([own[c.start :] for own, c in zip(rows, ordered, strict=True)]),
        decodes=tuple(_decode_groups(rows[: len(singles)])),
        prefills=tuple(prefills),
        sample_tokens=np.asarray([end - 1 for end, c in zip(ends, ordered, strict=True) if c.samples], np.int64),
    )


def _decode_groups(rows: list[Ints]) -> list[DecodeGroup]:
    """Cut queries, sorted by length, into groups that waste little on padding."""
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(rows):
        end, total = first, 0
        while end < len(rows):
            total += len(rows[end])
            if len(rows[end]) * (end + 1 - first) > MAX_PADDING * total:
                break
            end += 1
        groups.append(_decode_group(first, rows[first:end]))
        first = end
    return groups


def _decode_group(first: int, rows: list[Ints]) -> DecodeGroup:
    lengths = np.asarray([len(own) for own in rows], np.int64)
    padded = np.empty((len(rows), int(lengths.max())), np.int64)
    for line, own in zip(padded, rows, strict=True):
        line[: len(own)] = own
        line[len(own) :] = own[0]
    return DecodeGroup(first, lengths, padded)
