"""The paged KV cache as Paddle tensors over the pool that other processes read.

A block holds [layers, 2 (K, V), block_size, kv_heads, head_dim] in float32 or float16. On the CPU the tensors *are*
the pool's memory; on a GPU the cache is a device tensor, and blocks are staged to and from the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from app.errors import StartupError
from app.kv import KVPool
from app.kv.layout import ITEM_BYTES, KVDtype

_LARGEST_HALF = 65520.0
"""From here on the nearest half is infinity."""


class KVCache:
    """K and V of every layer, addressed by row (one token) or by head row (one token's head).

    Halves are moved as int32, two at a time: Paddle has neither ``gather`` nor ``scatter`` for float16 on CPUs.

    Attributes:
        k_rows, v_rows: per layer, [rows, kv_heads * head_dim], starting at the layer's own first row in block 0.
        row_stride: rows from one block's start to the next one's.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        num_layers: int,
        block_size_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        staged: bool,
        dtype: KVDtype = "float32",
    ) -> None:
        """``staged``: keep the blocks in a tensor of Paddle's current device instead of in the pool itself."""
        self._pool = pool
        self.dtype = dtype
        halves = dtype == "float16"
        self._host = pool.blocks.view(np.int32 if halves else np.float32)
        self._staged = staged
        self.num_kv_heads = num_kv_heads
        self.block_size_tokens = block_size_tokens
        self.row_stride = num_layers * 2 * block_size_tokens
        words = "int32" if halves else "float32"
        self._blocks = paddle.zeros(list(self._host.shape), words) if staged else _alias(self._host)
        row_bytes = num_kv_heads * head_dim * ITEM_BYTES[dtype]
        head_words = head_dim * ITEM_BYTES[dtype] // 4
        flat = _view(self._blocks, [pool.num_blocks * self.row_stride, row_bytes // 4], 0)
        # Of the whole, and then cut: Paddle puts a tensor that begins later at twice its offset.
        items = _view(flat.view("float16"), [flat.shape[0], -1], flat.data_ptr()) if halves else flat
        self.k_rows: list[paddle.Tensor] = []
        self.v_rows: list[paddle.Tensor] = []
        self._words: list[tuple[_Words, _Words]] = []
        """Per layer those of K and of V."""
        for layer in range(num_layers):
            both = []
            for which, rows in enumerate((self.k_rows, self.v_rows)):
                skip = (layer * 2 + which) * block_size_tokens
                start = self._blocks.data_ptr() + skip * row_bytes
                own = _view(flat[skip:], [-1, row_bytes // 4], start)
                both.append(_Words(own, _view(own, [-1, head_words], start)))
                rows.append(_view(items[skip:], [-1, num_kv_heads * head_dim], start))
            self._words.append((both[0], both[1]))
        self._check_alias()

    def write(self, layer: int, rows: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> None:
        """Store float32 K and V [n, kv_heads * head_dim] in ``rows``, in place, rounded to the nearest even half.

        What a half cannot hold becomes NaN, so that the sequence ends in an error: an infinite key could quietly
        take its token out of the answer.
        """
        for words, values in zip(self._words[layer], (k, v), strict=True):
            if self.dtype == "float16":
                held = paddle.where(values.abs() < _LARGEST_HALF, values, paddle.full([], np.nan))
                values = held.astype("float16").view("int32")
            paddle.scatter_(words.rows, rows, values)

    def read_heads(self, layer: int, head_rows: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """K and V of ``head_rows`` (row * kv_heads + head) as float32 [n, head_dim]."""
        k, v = (paddle.gather(words.heads, head_rows) for words in self._words[layer])
        if self.dtype == "float16":
            return k.view("float16").astype("float32"), v.view("float16").astype("float32")
        return k, v

    def export(self, blocks: Sequence[int]) -> None:
        """Bring blocks into the pool, where other processes read them. Nothing to do on the CPU."""
        if self._staged:
            self._host[list(blocks)] = paddle.gather(self._blocks, _index(blocks)).numpy()

    def import_(self, blocks: Sequence[int]) -> None:
        """Take over blocks that were pulled into the pool. Nothing to do on the CPU."""
        if self._staged:
            paddle.scatter_(self._blocks, _index(blocks), paddle.to_tensor(self._host[list(blocks)]))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks, here and in the pool."""
        self._host[list(blocks)] = 0
        self.import_(blocks)

    def _check_alias(self) -> None:
        """A copy somewhere in between would serve zeros to every reader: write through each end, read at the other."""
        last = len(self.k_rows) - 1
        width = self.v_rows[last].shape[1]
        self.write(last, _index([0]), paddle.zeros([1, width]), paddle.full([1, width], 7.5))
        self.export([0])
        block = self._pool.blocks[0].view(self.dtype)
        start = block.size * (2 * last + 1) // (2 * len(self.k_rows))
        seen = block[start : start + width]
        if not (np.all(seen == 7.5) and np.count_nonzero(block) == width):
            raise StartupError("the KV cache does not share its memory with the KV pool: this Paddle build copies")
        self.clear([0])


@dataclass(frozen=True, slots=True)
class _Words:
    """K or V of a layer in what ``gather`` and ``scatter`` know: float32, or pairs of halves as int32."""

    rows: paddle.Tensor
    """[rows, kv_heads * head_dim] of float32, half as wide of int32."""
    heads: paddle.Tensor
    """The same memory with a row per head."""


def _alias(host: np.ndarray) -> paddle.Tensor:
    tensor = paddle.utils.dlpack.from_dlpack(host)
    if tensor.data_ptr() != host.ctypes.data:
        raise StartupError("Paddle copied the KV pool instead of sharing it: this Paddle build is not supported")
    return tensor


def _view(tensor: paddle.Tensor, shape: list[int], pointer: int) -> paddle.Tensor:
    """Reshape without a copy; ``pointer`` is where the result must start (0: where ``tensor`` does)."""
    view = tensor.reshape(shape)
    if view.data_ptr() != (pointer or tensor.data_ptr()):
        raise StartupError("Paddle copied a view of the KV cache: FLAGS_use_stride_kernel must be on")
    return view


def _index(blocks: Sequence[int]) -> paddle.Tensor:
    return paddle.to_tensor(list(blocks), dtype="int64")
