"""A decoder layer out of single operations, for what no operation does as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle

if TYPE_CHECKING:
    from app.model.config import ModelConfig
    from workers.engine.kv_cache import KVCache
    from workers.engine.ops import Ops
    from workers.engine.ops.weights import Layer


def layer_by_ops(
    ops: Ops,
    x: paddle.Tensor,
    residual: paddle.Tensor | None,
    weights: Layer,
    cache: KVCache,
    index: int,
    inputs: Any,
    config: ModelConfig,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """See ``Ops.layer``."""
    epsilon = config.rms_norm_eps
    if residual is None:
        residual, x = x, ops.rms_norm(x, weights.input_norm, epsilon)
    else:
        x, residual = ops.add_rms_norm(x, residual, weights.input_norm, epsilon)
    qkv = ops.linear(x, weights.qkv)
    if weights.q_norm is not None and weights.k_norm is not None:
        qkv = _norm_heads(ops, qkv, weights.q_norm, weights.k_norm, config)
    x = ops.linear(ops.attention(qkv, cache, index, inputs, config.num_heads, config.head_dim), weights.o)
    x, residual = ops.add_rms_norm(x, residual, weights.post_norm, epsilon)
    return ops.linear(ops.silu_mul(x, weights.gate_up), weights.down), residual


def _norm_heads(
    ops: Ops, qkv: paddle.Tensor, q_norm: paddle.Tensor, k_norm: paddle.Tensor, config: ModelConfig
) -> paddle.Tensor:
    """RMSNorm of each head of q and k; V, behind them, stays as it is."""
    q_end = config.num_heads * config.head_dim
    k_end = q_end + config.num_kv_heads * config.head_dim
    parts = []
    for start, end, weight in ((0, q_end, q_norm), (q_end, k_end, k_norm)):
        heads = qkv[:, start:end].contiguous().reshape([-1, config.head_dim])
        parts.append(ops.rms_norm(heads, weight, config.rms_norm_eps).reshape([qkv.shape[0], -1]))
    return paddle.concat([*parts, qkv[:, k_end:]], axis=1)
