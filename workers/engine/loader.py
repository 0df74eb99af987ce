"""Weights from a model folder to what the operations compute with: rounded, fused, one copy in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from app.errors import ModelError
from app.model.config import ModelConfig
from workers.engine import ops
from workers.engine.ops.weights import Layer, Weights

Floats = npt.NDArray[np.float32]
WeightDtype = Literal["float16", "float32"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_PARTS = {
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "self_attn.o_proj": ("o", 0),
    "self_attn.q_norm": ("q_norm", 0),
    "self_attn.k_norm": ("k_norm", 0),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", 1),
    "mlp.down_proj": ("down", 0),
    "input_layernorm": ("input_norm", 0),
    "post_attention_layernorm": ("post_norm", 0),
}
_NUM_PARTS = {"qkv": 3, "gate_up": 2}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(slots=True)
class _Loading:
    config: ModelConfig
    ops: ops.Ops
    dtype: WeightDtype
    top: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[tuple[int, str], dict[int, ops.Weights]] = field(default_factory=dict)
    biases: dict[tuple[int, str], dict[int, Floats]] = field(default_factory=dict)


def load_weights(
    tensors: Iterable[tuple[str, Floats]], config: ModelConfig, operations: ops.Ops, dtype: WeightDtype
) -> Weights:
    """Read all tensors of a checkpoint, named and shaped as ``config.tensor_shapes()`` says.

    Matrices are rounded to ``dtype`` here, and nowhere else, so that all paths compute with the same numbers.

    Raises:
        ModelError: a tensor is missing, unknown, of the wrong shape or too large for ``dtype``; the message names it.
    """
    loading = _Loading(config, operations, dtype, layers=[{} for _ in range(config.num_layers)])
    shapes = config.tensor_shapes()
    for name, array in tensors:
        expected = shapes.pop(name, None)
        if expected is None:
            raise ModelError(f"tensor {name} is no part of a {config.architecture}, or comes twice")
        if array.shape != expected:
            raise ModelError(f"tensor {name} is {list(array.shape)}, the config says {list(expected)}")
        _place(loading, name, array)
    if shapes:
        raise ModelError(f"{len(shapes)} tensors are missing, the first is {next(iter(shapes))}")
    return Weights(
        embed=loading.top["model.embed_tokens.weight"],
        layers=[Layer(**layer) for layer in loading.layers],
        norm=loading.top["model.norm.weight"],
        head=loading.top["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"],
    )


def _place(loading: _Loading, name: str, values: Floats) -> None:
    match = _LAYER.fullmatch(name)
    if match is None:
        is_norm = values.ndim == 1
        operations = loading.ops
        loading.top[name] = (
            operations.vector(values) if is_norm else operations.table(_rounded(name, values, loading.dtype))
        )
        return
    index, module, kind = int(match[1]), match[2], match[3]
    target, part = _PARTS[module]
    if target.endswith("norm"):
        loading.layers[index][target] = loading.ops.vector(values)
        return
    if loading.config.rope_interleaved and module in _ROTATED:
        values = _halves(values, loading.config.head_dim)
    key = (index, target)
    if kind == "bias":
        loading.biases.setdefault(key, {})[part] = values
    else:
        loading.weights.setdefault(key, {})[part] = _rounded(name, values, loading.dtype)
    _make_matrix(loading, key)


def _make_matrix(loading: _Loading, key: tuple[int, str]) -> None:
    """Make the matrix if all its parts are here, in whatever order they came."""
    index, target = key
    config = loading.config
    has_bias = {"qkv": config.qkv_bias, "o": config.o_bias}.get(target, config.mlp_bias)
    count = _NUM_PARTS.get(target, 1)
    weights, biases = loading.weights.get(key, {}), loading.biases.get(key, {})
    if len(weights) < count or len(biases) < count * has_bias:
        return
    ordered = [weights[number] for number in range(count)]
    bias = np.concatenate([biases[number] for number in range(count)]) if has_bias else None
    make = loading.ops
    matrix = make.gated(*ordered, bias) if target == "gate_up" else make.matrix(ordered, bias)
    loading.layers[index][target] = matrix
    del loading.weights[key]
    loading.biases.pop(key, None)


def _halves(values: Floats, head_dim: int) -> Floats:
    """Reorder the rows of each head of q or k from pairs (0, 1), (2, 3) … to pairs (i, i + head_dim / 2).

    q and k change alike, so that their products stay what they are, and every kernel knows one way to rotate.
    """
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _rounded(name: str, values: Floats, dtype: WeightDtype) -> ops.Weights:
    if dtype == "float32":
        return values
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all() and np.isfinite(values).all():
        raise ModelError(f"tensor {name} has weights beyond the range of float16: set BATON_WEIGHT_DTYPE=float32")
    return rounded
