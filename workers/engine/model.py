"""The forward pass of a decoder of Llama's shape over flat ragged tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import paddle

from app.model.config import ModelConfig
from workers.engine import ops
from workers.engine.batch import Batch
from workers.engine.kv_cache import KVCache
from workers.engine.loader import Weights
from workers.engine.rope import rope_tables


class LlamaModel:
    """Weights and the KV cache they fill."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: KVCache, max_model_len: int) -> None:
        self._config = config
        self._weights = weights
        self._cache = cache
        self._cos, self._sin = rope_tables(config, max_model_len)

    @paddle.no_grad()
    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Compute a step, write its KV, and return float32 logits [len(batch.sample_tokens), vocab]."""
        config, weights = self._config, self._weights
        inputs = ops.prepare(batch, self._cache, config.num_heads, self._cos, self._sin)
        residual = paddle.gather(weights.embed, inputs.token_ids)
        x = ops.rms_norm(residual, weights.layers[0].input_norm, config.rms_norm_eps)
        for index, layer in enumerate(weights.layers):
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
            if layer.head_norm is not None:
                qkv = ops.norm_heads(qkv, layer.head_norm, config.rms_norm_eps)
            x = ops.attention(qkv, self._cache, index, inputs, config.num_heads, config.head_dim)
            x = ops.linear(x, layer.o, layer.o_bias)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, config.rms_norm_eps)
            inner = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
            x = ops.linear(inner, layer.down, layer.down_bias)
            last = index + 1 == len(weights.layers)
            if last:
                break
            x, residual = ops.add_rms_norm(x, residual, weights.layers[index + 1].input_norm, config.rms_norm_eps)
        if len(batch.sample_tokens) == 0:
            return np.empty((0, config.vocab_size), np.float32)
        rows = paddle.to_tensor(batch.sample_tokens)
        final = paddle.gather(x, rows) + paddle.gather(residual, rows)
        return ops.logits(ops.rms_norm(final, weights.norm, config.rms_norm_eps), weights.head).numpy()
