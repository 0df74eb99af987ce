"""What Baton needs to know of a model's ``config.json``, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)

_MAX_LAYERS = 4096  # far above any model; a damaged file must not make us list a billion tensors

# The parameters that each rope type needs; the factors of "llama3" follow Llama 3.1's own definition.
_ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a decoder.

    ``rope_scaling`` is None or ``{"rope_type": "linear" | "llama3", …}`` with the parameters of that type as floats.
    ``eos_token_ids`` may be empty: such a model stops at ``max_tokens`` or a stop string only.
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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read ``config.json``; ``generation_config.json``, where there is one, says which tokens end an answer.

        Fields that are absent take the defaults of transformers' LlamaConfig.

        Raises:
            ModelError: an architecture, option or value that Baton cannot compute exactly, by name.
        """
        architecture = _architecture(config)
        _refuse_variants(config)
        hidden_size = _positive_int(config, "hidden_size")
        num_heads = _positive_int(config, "num_attention_heads")
        num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
        head_dim = _positive_int(config, "head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2:
            raise ModelError(f"config: head_dim {head_dim} is odd; rotary embeddings need pairs")
        num_layers = _positive_int(config, "num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            raise ModelError(f"config: num_hidden_layers {num_layers} is above {_MAX_LAYERS}")
        rope_theta, rope_scaling = _rope(config)
        vocab_size = _positive_int(config, "vocab_size")
        eos = (generation_config or {}).get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_positive_int(config, "max_position_embeddings", 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=_bos(config, vocab_size),
            eos_token_ids=_token_ids(config.get("eos_token_id") if eos is None else eos, "eos_token_id", vocab_size),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that such a model has: name → shape, linear weights as [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                f"{prefix}input_layernorm.weight": (hidden,),
                f"{prefix}self_attn.q_proj.weight": (q_rows, hidden),
                f"{prefix}self_attn.k_proj.weight": (kv_rows, hidden),
                f"{prefix}self_attn.v_proj.weight": (kv_rows, hidden),
                f"{prefix}self_attn.o_proj.weight": (hidden, q_rows),
                f"{prefix}post_attention_layernorm.weight": (hidden,),
                f"{prefix}mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}mlp.up_proj.weight": (inner, hidden),
                f"{prefix}mlp.down_proj.weight": (hidden, inner),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(f"config: architectures must name exactly one architecture, not {names!r}")
    if names[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"config: architecture {names[0]!r} is not supported; supported: {supported}")
    return str(names[0])


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Refuse options that change what a Llama computes and that the engine does not implement."""
    plain: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "quantization_config": (None,),
        "rope_interleaved": (False,),
        "partial_rotary_factor": (1, None),
        "sliding_window": (None,),
    }
    for field, allowed in plain.items():
        value = config.get(field, allowed[0])
        if value not in allowed:
            raise ModelError(f"config: {field} = {value!r} is not supported")


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling). Newer files hold both in ``rope_parameters``, older ones in two fields."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config: rope_scaling must be an object, not {scaling!r}")
    theta = _positive_float({"rope_theta": scaling.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise ModelError("config: rope_parameters.partial_rotary_factor other than 1 is not supported")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type not in _ROPE_PARAMETERS:
        raise ModelError(f"config: rope type {rope_type!r} is not supported; supported: default, linear, llama3")
    values = {field: _positive_float(scaling, field, None) for field in _ROPE_PARAMETERS[rope_type]}
    if rope_type == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ModelError("config: rope high_freq_factor must be above low_freq_factor")
    return theta, {"rope_type": rope_type, **values}


def _positive_int(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config: {field} must be a positive integer, not {value!r}")
    return value


def _positive_float(config: Mapping[str, Any], field: str, default: float | None) -> float:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ModelError(f"config: {field} must be a positive number, not {value!r}")
    return float(value)


def _bos(config: Mapping[str, Any], vocab_size: int) -> int | None:
    ids = _token_ids(config.get("bos_token_id"), "bos_token_id", vocab_size)
    return ids[0] if ids else None


def _token_ids(value: Any, field: str, vocab_size: int) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ModelError(f"config: {field} holds {token_id!r}, no token id below vocab_size {vocab_size}")
    return tuple(ids)
