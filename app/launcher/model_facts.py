"""What the launcher has to know of a model: enough to say what it will cost. Crosses a process boundary as JSON."""

from __future__ import annotations

from app.model.config import ModelConfig
from app.schemas import Frozen

_FP32_BYTES = 4


class ModelFacts(Frozen):
    """Sizes are those of fp32, which the workers compute in."""

    name: str
    path: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_position_embeddings: int

    def block_bytes(self, block_size_tokens: int) -> int:
        return self.kv_bytes_per_token * block_size_tokens


def model_facts(name: str, path: str, config: ModelConfig) -> ModelFacts:
    """Compute the sizes of a Llama-shaped decoder from its shape."""
    embedding = config.vocab_size * config.hidden_size
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)  # q, o and k, v
    mlp = 3 * config.hidden_size * config.intermediate_size
    norms = 2 * config.hidden_size
    parameters = (
        embedding * (1 if config.tie_word_embeddings else 2)
        + config.num_layers * (attention + mlp + norms)
        + config.hidden_size
    )
    return ModelFacts(
        name=name,
        path=path,
        weight_bytes=parameters * _FP32_BYTES,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * _FP32_BYTES,
        max_position_embeddings=config.max_position_embeddings,
    )
