"""What the launcher has to know of a model: enough to say what it will cost. Crosses a process boundary as JSON."""

from __future__ import annotations

from math import prod

from app.kv.layout import KVDtype, block_bytes_of
from app.model.config import ModelConfig
from app.schemas import Frozen

_FP32_BYTES = 4


class ModelFacts(Frozen):
    """Sizes as they are in the workers' memory."""

    name: str
    path: str
    weight_bytes: int
    table_bytes: int
    """Of what is computed once and kept: the cosines and sines of all positions."""
    kv_bytes_per_token: int
    max_position_embeddings: int

    def block_bytes(self, block_size_tokens: int) -> int:
        return self.kv_bytes_per_token * block_size_tokens


def model_facts(
    name: str,
    path: str,
    config: ModelConfig,
    weight_item_bytes: int = _FP32_BYTES,
    kv_dtype: KVDtype = "float32",
) -> ModelFacts:
    """Compute the sizes from the shapes of the model's tensors. Norms, biases and rotary tables are float32."""
    shapes = config.tensor_shapes().values()
    weight_bytes = sum(prod(shape) * (weight_item_bytes if len(shape) > 1 else _FP32_BYTES) for shape in shapes)
    kv_shape = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return ModelFacts(
        name=name,
        path=path,
        weight_bytes=weight_bytes,
        table_bytes=2 * config.max_context_tokens * config.head_dim * _FP32_BYTES,
        kv_bytes_per_token=block_bytes_of(kv_dtype, block_size_tokens=1, **kv_shape),
        max_position_embeddings=config.max_position_embeddings,
    )
