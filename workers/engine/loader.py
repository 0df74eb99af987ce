"""Weights from a model folder to Paddle tensors, fused, one copy in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import paddle

from app.errors import ModelError
from app.model.config import ModelConfig

Floats = npt.NDArray[np.float32]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_PARTS = {
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "self_attn.o_proj": ("o", 0),
    "self_attn.q_norm": ("head_norm", 0),
    "self_attn.k_norm": ("head_norm", 1),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", 1),
    "mlp.down_proj": ("down", 0),
    "input_layernorm": ("input_norm", 0),
    "post_attention_layernorm": ("post_norm", 0),
}
_NUM_PARTS = {"qkv": 3, "gate_up": 2, "head_norm": 2}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(slots=True)
class Layer:
    """Weights of one layer. Matrices are [in, out]: Paddle's matmul is up to twice as fast with few rows so.

    What an architecture does not have is None.
    """

    input_norm: paddle.Tensor
    qkv: paddle.Tensor
    o: paddle.Tensor
    post_norm: paddle.Tensor
    gate_up: paddle.Tensor
    down: paddle.Tensor
    qkv_bias: paddle.Tensor | None = None
    o_bias: paddle.Tensor | None = None
    gate_up_bias: paddle.Tensor | None = None
    down_bias: paddle.Tensor | None = None
    head_norm: paddle.Tensor | None = None
    """[heads + kv_heads, head_dim]: the weight of q's norm for each of its heads, then that of k's."""


@dataclass(slots=True)
class Weights:
    """All weights. ``head`` is [vocab, hidden]; with tied embeddings it is ``embed`` itself."""

    embed: paddle.Tensor
    layers: list[Layer]
    norm: paddle.Tensor
    head: paddle.Tensor


@dataclass(slots=True)
class _Loading:
    top: dict[str, paddle.Tensor] = field(default_factory=dict)
    layers: list[dict[str, paddle.Tensor]] = field(default_factory=list)
    pending: dict[tuple[int, str], dict[int, Floats]] = field(default_factory=dict)


def load_weights(tensors: Iterable[tuple[str, Floats]], config: ModelConfig) -> Weights:
    """Read all tensors of a checkpoint, named and shaped as ``config.tensor_shapes()`` says.

    Raises:
        ModelError: a tensor is missing, unknown or of the wrong shape; the message names it.
    """
    loading = _Loading(layers=[{} for _ in range(config.num_layers)])
    shapes = config.tensor_shapes()
    for name, array in tensors:
        expected = shapes.pop(name, None)
        if expected is None:
            raise ModelError(f"tensor {name} is no part of a {config.architecture}, or comes twice")
        if array.shape != expected:
            raise ModelError(f"tensor {name} is {list(array.shape)}, the config says {list(expected)}")
        _place(loading, config, name, array)
    if shapes:
        raise ModelError(f"{len(shapes)} tensors are missing, the first is {next(iter(shapes))}")
    return Weights(
        embed=loading.top["model.embed_tokens.weight"],
        layers=[Layer(**layer) for layer in loading.layers],
        norm=loading.top["model.norm.weight"],
        head=loading.top["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"],
    )


def _place(loading: _Loading, config: ModelConfig, name: str, values: Floats) -> None:
    match = _LAYER.fullmatch(name)
    if match is None:
        loading.top[name] = paddle.to_tensor(values)
        return
    index, module = int(match[1]), match[2]
    target, part = _PARTS[module]
    fused = f"{target}_bias" if match[3] == "bias" else target
    if config.rope_interleaved and module in _ROTATED:
        values = _halves(values, config.head_dim)
    parts = loading.pending.setdefault((index, fused), {})
    parts[part] = values
    if len(parts) == _NUM_PARTS.get(target, 1):
        arrays = [parts[number] for number in range(len(parts))]
        loading.layers[index][fused] = paddle.to_tensor(_fuse(fused, arrays, config))
        del loading.pending[index, fused]


def _fuse(target: str, parts: list[Floats], config: ModelConfig) -> Floats:
    if target == "head_norm":
        return np.repeat(np.stack(parts), [config.num_heads, config.num_kv_heads], axis=0)
    if parts[0].ndim == 1:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.ascontiguousarray(np.concatenate([part.T for part in parts], axis=1))


def _halves(values: Floats, head_dim: int) -> Floats:
    """Reorder the rows of each head of q or k from pairs (0, 1), (2, 3) … to pairs (i, i + head_dim / 2).

    q and k change alike, so that their products stay what they are, and every kernel knows one way to rotate.
    """
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
