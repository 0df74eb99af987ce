"""The operations of a step in pure Paddle ops: on GPUs, and where kernels cannot be compiled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import paddle
from paddle.nn import functional

from app.model.config import ModelConfig
from workers.engine.batch import Batch
from workers.engine.kv_cache import KVCache
from workers.engine.ops.by_ops import layer_by_ops
from workers.engine.ops.gathers import gathers
from workers.engine.ops.weights import Layer

Weights = npt.NDArray[np.float16] | npt.NDArray[np.float32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights as [in, out]: Paddle's matmul is up to twice as fast with few rows so."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A ``DecodeGroup`` as tensors."""

    first: int
    count: int
    head_rows: paddle.Tensor
    """[count * kv_heads * length] for ``KVCache.read_heads``."""
    mask: paddle.Tensor | None
    """[count, 1, 1, length]: 0 where a query may look, -inf at padding; None without padding."""


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A ``PrefillPiece`` as tensors."""

    first: int
    count: int
    head_rows: paddle.Tensor
    """[kv_heads * end]"""
    mask: paddle.Tensor
    """[count, end]: causal, 0 or -inf."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What every layer of a step shares."""

    token_ids: paddle.Tensor
    write_rows: paddle.Tensor
    cos: paddle.Tensor
    """[T, heads + kv_heads, head_dim]: spread over the heads once per step, broadcasting costs six times as much."""
    sin: paddle.Tensor
    decodes: tuple[DecodeInputs, ...]
    prefills: tuple[PrefillInputs, ...]


class PaddleOps:
    """Computes in float32, over keys and values as the cache rounds them, wherever Paddle's current device is."""

    name = "pure Paddle"

    def vector(self, values: Floats) -> paddle.Tensor:
        return paddle.to_tensor(values)

    def matrix(self, parts: list[Weights], bias: Floats | None = None) -> Matrix:
        fused = np.concatenate([part.T for part in parts], axis=1, dtype=np.float32)
        return Matrix(paddle.to_tensor(fused), None if bias is None else paddle.to_tensor(bias))

    def gated(self, gate: Weights, up: Weights, bias: Floats | None = None) -> Matrix:
        return self.matrix([gate, up], bias)

    def table(self, values: Weights) -> paddle.Tensor:
        return paddle.to_tensor(values.astype(np.float32))

    def rotation(self, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
        return cos, sin

    def prepare(self, batch: Batch, cache: KVCache, num_heads: int, rotation: tuple[Floats, Floats]) -> StepInputs:
        """Turn the index arrays of a step into tensors, once for all layers."""
        cos, sin = rotation
        rotated_heads = num_heads + cache.num_kv_heads
        heads = np.arange(cache.num_kv_heads, dtype=np.int64)
        groups, pieces = gathers(batch, block_size_tokens=cache.block_size_tokens, row_stride=cache.row_stride)
        decodes = []
        for group in groups:
            rows = group.rows[:, None, :] * cache.num_kv_heads + heads[None, :, None]
            mask = _padding(group.lengths)
            decodes.append(DecodeInputs(group.first, len(group.lengths), paddle.to_tensor(rows.reshape(-1)), mask))
        prefills = []
        for piece in pieces:
            rows = piece.rows[None, :] * cache.num_kv_heads + heads[:, None]
            mask = _causal(piece.num_tokens, len(piece.rows))
            prefills.append(PrefillInputs(piece.first, piece.num_tokens, paddle.to_tensor(rows.reshape(-1)), mask))
        return StepInputs(
            token_ids=paddle.to_tensor(batch.token_ids),
            write_rows=paddle.to_tensor(batch.write_rows),
            cos=paddle.to_tensor(np.repeat(cos[batch.positions][:, None, :], rotated_heads, axis=1)),
            sin=paddle.to_tensor(np.repeat(sin[batch.positions][:, None, :], rotated_heads, axis=1)),
            decodes=tuple(decodes),
            prefills=tuple(prefills),
        )

    def embed(self, table: paddle.Tensor, inputs: StepInputs) -> paddle.Tensor:
        return paddle.gather(table, inputs.token_ids)

    def linear(self, x: paddle.Tensor, matrix: Matrix) -> paddle.Tensor:
        product = paddle.matmul(x, matrix.weight)
        return product if matrix.bias is None else product + matrix.bias

    def silu_mul(self, x: paddle.Tensor, gated: Matrix) -> paddle.Tensor:
        return functional.swiglu(self.linear(x, gated))

    def logits(self, x: paddle.Tensor, table: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, table, transpose_y=True)

    def rms_norm(self, x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
        mean_square = paddle.mean(paddle.square(x), axis=-1, keepdim=True)
        return x * paddle.rsqrt(mean_square + epsilon) * weight

    def add_rms_norm(
        self, x: paddle.Tensor, residual: paddle.Tensor, weight: paddle.Tensor, epsilon: float
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, epsilon), residual

    def layer(
        self,
        x: paddle.Tensor,
        residual: paddle.Tensor | None,
        weights: Layer,
        cache: KVCache,
        index: int,
        inputs: StepInputs,
        config: ModelConfig,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        return layer_by_ops(self, x, residual, weights, cache, index, inputs, config)

    def attention(
        self, qkv: paddle.Tensor, cache: KVCache, layer: int, inputs: StepInputs, num_heads: int, head_dim: int
    ) -> paddle.Tensor:
        num_tokens, num_kv_heads = qkv.shape[0], cache.num_kv_heads
        split = qkv.reshape([num_tokens, num_heads + 2 * num_kv_heads, head_dim])
        rotated = _rotate(split[:, : num_heads + num_kv_heads], inputs)
        _write_kv(cache, layer, rotated[:, num_heads:], split[:, num_heads + num_kv_heads :], inputs)
        queries = rotated[:, :num_heads] * head_dim**-0.5
        parts = [_decode_attention(queries, cache, layer, group) for group in inputs.decodes]
        parts += [_prefill_attention(queries, cache, layer, piece) for piece in inputs.prefills]
        return parts[0] if len(parts) == 1 else paddle.concat(parts)


def _rotate(x: paddle.Tensor, inputs: StepInputs) -> paddle.Tensor:
    """Rotate [T, heads, head_dim] to the tokens' positions."""
    return x * inputs.cos + paddle.roll(x, x.shape[-1] // 2, axis=-1) * inputs.sin


def _write_kv(cache: KVCache, layer: int, k: paddle.Tensor, v: paddle.Tensor, inputs: StepInputs) -> None:
    """Store K and V [T, kv_heads, head_dim] of the step's tokens, in place."""
    cache.write(layer, inputs.write_rows, k.reshape([k.shape[0], -1]), v.reshape([v.shape[0], -1]))


def _decode_attention(queries: paddle.Tensor, cache: KVCache, layer: int, group: DecodeInputs) -> paddle.Tensor:
    """One query per sequence: batched over (sequence, kv head), the query heads of a kv head in one product."""
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    batch = group.count * cache.num_kv_heads
    keys, values = (each.reshape([batch, -1, head_dim]) for each in cache.read_heads(layer, group.head_rows))
    own = queries[group.first : group.first + group.count].reshape([batch, -1, head_dim])
    scores = paddle.matmul(own, keys, transpose_y=True)
    if group.mask is not None:
        scores = scores.reshape([group.count, cache.num_kv_heads, -1, keys.shape[1]]).add_(group.mask)
        scores = scores.reshape([batch, -1, keys.shape[1]])
    return paddle.matmul(functional.softmax(scores), values).reshape([group.count, num_heads * head_dim])


def _prefill_attention(queries: paddle.Tensor, cache: KVCache, layer: int, piece: PrefillInputs) -> paddle.Tensor:
    """Consecutive queries of one sequence: batched over kv heads, (query head, token) in one product."""
    num_heads, head_dim = queries.shape[1], queries.shape[2]
    num_kv_heads, group = cache.num_kv_heads, num_heads // cache.num_kv_heads
    keys, values = (each.reshape([num_kv_heads, -1, head_dim]) for each in cache.read_heads(layer, piece.head_rows))
    own = queries[piece.first : piece.first + piece.count].transpose([1, 0, 2])
    scores = paddle.matmul(own.reshape([num_kv_heads, group * piece.count, head_dim]), keys, transpose_y=True)
    scores = scores.reshape([num_heads, piece.count, -1]).add_(piece.mask)
    weights = functional.softmax(scores).reshape([num_kv_heads, group * piece.count, -1])
    mixed = paddle.matmul(weights, values).reshape([num_heads, piece.count, head_dim])
    return mixed.transpose([1, 0, 2]).reshape([piece.count, num_heads * head_dim])


def _padding(lengths: np.ndarray) -> paddle.Tensor | None:
    longest = int(lengths.max())
    if int(lengths.min()) == longest:
        return None
    mask = np.where(np.arange(longest)[None, :] < lengths[:, None], 0, -np.inf).astype(np.float32)
    return paddle.to_tensor(mask[:, None, None, :])


def _causal(num_tokens: int, end: int) -> paddle.Tensor:
    mask = np.zeros((num_tokens, end), np.float32)
    mask[:, end - num_tokens :] = np.triu(np.full((num_tokens, num_tokens), -np.inf, np.float32), 1)
    return paddle.to_tensor(mask)
