"""Which rows of the KV cache each query reads, in numpy, for attention that gathers them (see ``batch``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.protocol.blocks import blocks_for
from workers.engine.batch import Batch, Ints

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


def gathers(batch: Batch, *, block_size_tokens: int, row_stride: int) -> tuple[list[DecodeGroup], list[PrefillPiece]]:
    """Cut a step into decode groups and prefill pieces, in the order of its tokens."""
    offsets = np.arange(block_size_tokens, dtype=np.int64)
    singles: list[Ints] = []
    pieces: list[PrefillPiece] = []
    for first, count, start, table in batch.spans.tolist():
        blocks = batch.tables[table : table + blocks_for(start + count, block_size_tokens)].astype(np.int64)
        rows = (blocks[:, None] * row_stride + offsets).reshape(-1)[: start + count]
        if count == 1:
            singles.append(rows)
            continue
        for done in range(0, count, TILE_TOKENS):
            num_tokens = min(TILE_TOKENS, count - done)
            pieces.append(PrefillPiece(first + done, num_tokens, rows[: start + done + num_tokens]))
    return _decode_groups(singles), pieces


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
