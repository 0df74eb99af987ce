"""The architectures that Baton serves: decoders of Llama's shape, and in what each of them differs from Llama.

Each one is what the class of that name in transformers computes; what a ``config.json`` leaves out is what its
configuration class there assumes. An option that would change the result, and that is not here, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from app.errors import ModelError
from app.model.fields import positive_int, switch


class Window(StrEnum):
    """When ``sliding_window`` counts."""

    NEVER = "never"
    STATED = "stated"
    """Whenever it is a number; all layers have it."""
    SWITCHED = "switched"
    """Only with ``use_sliding_window``, in the layers from ``max_window_layers`` on (or as ``layer_types`` say)."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """In what an architecture differs from Llama. A bias is there always, never, or if the named field is true."""

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norm: bool = False
    """RMSNorm of each head of q and k, before they are rotated."""
    rope_interleaved: bool = False
    """Rotary embeddings turn neighbours (0, 1), (2, 3) … against each other (GPT-J), not halves (i, i + d / 2)."""
    window: Window = Window.NEVER
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of the fields in which it differs from Llama's configuration class."""

    def has_bias(self, which: bool | str, config: Mapping[str, Any]) -> bool:
        """Whether the projections have the bias ``which``: one of the three above."""
        return which if isinstance(which, bool) else switch(config, which)


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_ERNIE = Architecture(
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    rope_interleaved=True,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Architecture(
        window=Window.STATED,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, window=Window.SWITCHED, defaults=_QWEN),
    "Qwen3ForCausalLM": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        head_norm=True,
        window=Window.SWITCHED,
        defaults=_QWEN | {"head_dim": 128},
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_ForCausalLM": _ERNIE,  # its name before transformers knew it
}

_COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048}

# Options that some program knows and that change the result, with the values, beside null, under which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "quantization_config": (),
    "compression_config": (),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "use_mrope": (False,),
    "compression_ratio": (1,),
    "scale_qk_coeff": (1,),
}
_BIAS_FIELDS = ("attention_bias", "mlp_bias", "use_bias")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_architecture(config: Mapping[str, Any]) -> tuple[str, Architecture, dict[str, Any]]:
    """Return name, architecture, and ``config`` completed with the architecture's defaults.

    Raises:
        ModelError: an architecture or option that is not supported, by name.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(f"config: architectures must name exactly one architecture, not {names!r}")
    name = names[0]
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"config: architecture {name!r} is not supported; supported: {supported}")
    for option, allowed in _PLAIN.items():
        if config.get(option) not in (*allowed, None):
            raise ModelError(f"config: {option} = {config[option]!r} is not supported")
    _refuse_unread_biases(name, architecture, config)
    return name, architecture, {**_COMMON_DEFAULTS, **architecture.defaults, **config}


def _refuse_unread_biases(name: str, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """A bias that the config announces and the architecture does not have. Qwen2's is there whatever is said."""
    read = {architecture.qkv_bias, architecture.o_bias, architecture.mlp_bias}
    for option in _BIAS_FIELDS:
        always_there = option == "attention_bias" and architecture.qkv_bias is True
        if option not in read and not always_there and switch(config, option):
            raise ModelError(f"config: {option} = true is not supported in a {name}")


def sliding_window(architecture: Architecture, config: Mapping[str, Any], num_layers: int) -> int | None:
    """How many tokens back a layer looks, itself included; None: all layers look back to the first token.

    Raises:
        ModelError: a kind of attention that is not supported, or a window without a size.
    """
    kinds = _layer_types(config)
    stated = config.get("sliding_window") is not None
    if stated and architecture.window is Window.NEVER:
        raise ModelError(f"config: sliding_window = {config['sliding_window']!r} is not supported")
    used = stated
    if architecture.window is Window.SWITCHED:
        first = config.get("max_window_layers")
        some_layer = "sliding_attention" in kinds if kinds else not isinstance(first, int) or first < num_layers
        used = switch(config, "use_sliding_window") and stated and some_layer
    if not used and "sliding_attention" in kinds:
        raise ModelError("config: layer_types holds 'sliding_attention', but no sliding_window is in use")
    return positive_int(config, "sliding_window") if used else None


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    kinds = config.get("layer_types") or []
    other = [kind for kind in kinds if kind not in _LAYER_TYPES] if isinstance(kinds, list) else [kinds]
    if other:
        raise ModelError(f"config: layer_types holds {other[0]!r}; supported: {', '.join(_LAYER_TYPES)}")
    return list(kinds)
