"""What Baton needs to know of a model's ``config.json``, checked once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import ModelError
from app.model.architectures import read_architecture, sliding_window
from app.model.fields import positive_float, positive_int, switch, token_ids
from app.model.rope_scaling import read_rope

_MAX_LAYERS = 4096  # far above any model; a damaged file must not make us list a billion tensors


@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a decoder.

    ``rope_scaling`` is None or ``{"rope_type": "linear" | "llama3" | "yarn", …}`` with the parameters of that type.
    ``eos_token_ids`` may be empty: such a model stops at ``max_tokens`` or a stop string only.
    What is only in some architectures has a default: see ``architectures``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    rope_interleaved: bool = False
    sliding_window: int | None = None
    """How many tokens back some layers look, itself included."""

    @property
    def max_context_tokens(self) -> int:
        """The longest context that is computed exactly: every token lies within the window of every other one."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read ``config.json``; ``generation_config.json``, where there is one, says which tokens end an answer.

        Fields that are absent take the defaults of the architecture's configuration class in transformers.

        Raises:
            ModelError: an architecture, option or value that Baton cannot compute exactly, by name.
        """
        name, architecture, config = read_architecture(config)
        hidden_size = positive_int(config, "hidden_size")
        num_heads = positive_int(config, "num_attention_heads")
        num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
        head_dim = positive_int(config, "head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2:
            raise ModelError(f"config: head_dim {head_dim} is odd; rotary embeddings need pairs")
        num_layers = positive_int(config, "num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            raise ModelError(f"config: num_hidden_layers {num_layers} is above {_MAX_LAYERS}")
        max_positions = positive_int(config, "max_position_embeddings")
        rope_theta, rope_scaling = read_rope(config, max_positions)
        vocab_size = positive_int(config, "vocab_size")
        bos = token_ids(config.get("bos_token_id"), "bos_token_id", vocab_size)
        eos = (generation_config or {}).get("eos_token_id")
        return cls(
            architecture=name,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=positive_float(config, "rms_norm_eps", None),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=max_positions,
            tie_word_embeddings=switch(config, "tie_word_embeddings"),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=token_ids(config.get("eos_token_id") if eos is None else eos, "eos_token_id", vocab_size),
            qkv_bias=architecture.has_bias(architecture.qkv_bias, config),
            o_bias=architecture.has_bias(architecture.o_bias, config),
            mlp_bias=architecture.has_bias(architecture.mlp_bias, config),
            head_norm=architecture.head_norm,
            rope_interleaved=architecture.rope_interleaved,
            sliding_window=sliding_window(architecture, config, num_layers),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that such a model has: name → shape, linear weights as [out, in]."""
        hidden = self.hidden_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes(q_rows, kv_rows)}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _layer_shapes(self, q_rows: int, kv_rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        projections = {
            "self_attn.q_proj": (q_rows, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv_rows, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv_rows, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, q_rows, self.o_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        for name, (rows, columns, bias) in projections.items():
            yield f"{name}.weight", (rows, columns)
            if bias:
                yield f"{name}.bias", (rows,)
        if self.head_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "input_layernorm.weight", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)
