"""The weights of a model, in the form that the operations want them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import paddle


@dataclass(slots=True)
class Layer:
    """Weights of one layer; norms are tensors, the others what ``Ops.matrix`` and ``Ops.gated`` made.

    ``q_norm`` and ``k_norm`` [head_dim]: of each head of q and k, before they are rotated; None where there are none.
    """

    input_norm: paddle.Tensor
    qkv: Any
    o: Any
    post_norm: paddle.Tensor
    gate_up: Any
    down: Any
    q_norm: paddle.Tensor | None = None
    k_norm: paddle.Tensor | None = None


@dataclass(slots=True)
class Weights:
    """All weights. ``embed`` and ``head`` are what ``Ops.table`` made; with tied embeddings they are the same."""

    embed: Any
    layers: list[Layer]
    norm: paddle.Tensor
    head: Any
