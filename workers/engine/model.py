"""The forward pass of a Llama model over flat ragged tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import paddle

from app.model.config import ModelConfig
from workers.engine.batch import Batch
from workers.engine.kv_cache import KVCache
from workers.engine.ops import Ops
from workers.engine.ops.weights import Weights
from workers.engine.rope import rope_tables


class LlamaModel:
    """Weights and the KV cache they fill."""

    def __init__(
        self, config: ModelConfig, weights: Weights, cache: KVCache, max_model_len: int, operations: Ops
    ) -> None:
        self._config = config
        self._weights = weights
        self._cache = cache
        self._ops = operations
        self._rotation = operations.rotation(*rope_tables(config, max_model_len))

    @paddle.no_grad()
    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Compute a step, write its KV, and return float32 logits [len(batch.sample_tokens), vocab]."""
        config, weights, ops = self._config, self._weights, self._ops
        inputs = ops.prepare(batch, self._cache, config.num_heads, self._rotation)
        x, residual = ops.embed(weights.embed, inputs), None
        for index, layer in enumerate(weights.layers):
            x, residual = ops.layer(x, residual, layer, self._cache, index, inputs, config)
        if len(batch.sample_tokens) == 0:
            return np.empty((0, config.vocab_size), np.float32)
        rows = paddle.to_tensor(batch.sample_tokens)
        final = paddle.gather(x, rows) + paddle.gather(residual, rows)
        return ops.logits(ops.rms_norm(final, weights.norm, config.rms_norm_eps), weights.head).numpy()
