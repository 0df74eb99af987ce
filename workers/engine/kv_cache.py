"""The paged KV cache as Paddle tensors over the pool that other processes read.

A block holds float32 [layers, 2 (K, V), block_size, kv_heads, head_dim]. On the CPU the tensors *are* the
pool's memory; on a GPU the cache is a device tensor, and blocks are staged to and from the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from app.errors import StartupError
from app.kv import KVPool


class KVCache:
    """K and V of every layer, addressed by row (one token) or by head row (one token's head).

    Attributes:
        k_rows, v_rows: per layer, [rows, kv_heads * head_dim], starting at the layer's own first row in block 0.
        k_heads, v_heads: the same memory as [rows * kv_heads, head_dim].
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
    ) -> None:
        """``staged``: keep the blocks in a tensor of Paddle's current device instead of in the pool itself."""
        self._pool = pool
        self._host = pool.blocks.view(np.float32)
        self._staged = staged
        self.num_kv_heads = num_kv_heads
        self.block_size_tokens = block_size_tokens
        self.row_stride = num_layers * 2 * block_size_tokens
        self._blocks = paddle.zeros(list(self._host.shape)) if staged else _alias(self._host)
        row_floats = num_kv_heads * head_dim
        flat = _view(self._blocks, [pool.num_blocks * self.row_stride, row_floats], 0)
        self.k_rows: list[paddle.Tensor] = []
        self.v_rows: list[paddle.Tensor] = []
        self.k_heads: list[paddle.Tensor] = []
        self.v_heads: list[paddle.Tensor] = []
        for layer in range(num_layers):
            for which, (rows, heads) in enumerate(((self.k_rows, self.k_heads), (self.v_rows, self.v_heads))):
                skip = (layer * 2 + which) * block_size_tokens
                own = _view(flat[skip:], [-1, row_floats], self._blocks.data_ptr() + skip * row_floats * 4)
                rows.append(own)
                heads.append(_view(own, [-1, head_dim], own.data_ptr()))
        self._check_alias()

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
        marks = paddle.full([1, self.v_rows[last].shape[1]], 7.5)
        paddle.scatter_(self.v_rows[last], paddle.to_tensor([0], dtype="int64"), marks)
        self.export([0])
        floats = self._host[0].size
        start = floats * (2 * last + 1) // (2 * len(self.k_rows))
        seen = self._host[0, start : start + marks.shape[1]]
        if not (np.all(seen == 7.5) and np.count_nonzero(self._host[0]) == marks.shape[1]):
            raise StartupError("the KV cache does not share its memory with the KV pool: this Paddle build copies")
        self.clear([0])


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
