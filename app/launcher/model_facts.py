"""What the launcher has to know of a model: enough to say what it will cost. Crosses a process boundary as JSON."""

from __future__ import annotations

from math import prod

from app.model.config import ModelConfig
from app.schemas import Frozen

_FP32_BYTES = 4


class ModelFacts(Frozen):
    """Sizes as they are in the workers' memory."""

    name: str
    path: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_position_embeddings: int

    def block_bytes(self, block_size_tokens: int) -> int:
        return self.kv_bytes_per_token * block_size_tokens


def model_facts(name: str, path: str, config: ModelConfig, weight_item_bytes: int = _FP32_BYTES) -> ModelFacts:
    """Compute the sizes from the shapes of the model's tensors. The KV cache is float32."""
    parameters = sum(prod(shape) for shape in config.tensor_shapes().values())
    return ModelFacts(
        name=name,
        path=path,
        weight_bytes=parameters * weight_item_bytes,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * _FP32_BYTES,
        max_position_embeddings=config.max_position_embeddings,
    )
