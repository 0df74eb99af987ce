"""The operations of a step, twice: in pure Paddle, and as compiled kernels for CPUs.

Both work on flat ragged tokens (``x`` is [T, features], the tokens of all sequences behind each other) and on the
same weights: those of a matrix are rounded once, when they are loaded, and all sums are formed in float32. They
agree to float rounding. Compiled, a token's results do not depend on what else is in the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import paddle

    from app.model.config import ModelConfig
    from workers.engine.batch import Batch
    from workers.engine.kv_cache import KVCache
    from workers.engine.ops.weights import Layer
    from workers.engine.thread_board import ThreadBoard

Weights = npt.NDArray[np.float16] | npt.NDArray[np.float32]
"""Of a matrix, as they are stored."""
Floats = npt.NDArray[np.float32]


class Ops(Protocol):
    """What the model computes with. The kinds of weights and inputs are each implementation's own."""

    name: str

    def vector(self, values: Floats) -> paddle.Tensor:
        """The weight of a norm."""

    def matrix(self, parts: list[Weights], bias: Floats | None = None) -> Any:
        """Weights [out, in] of a linear layer, several of which lie one behind the other; ``bias``: [all outs]."""

    def gated(self, gate: Weights, up: Weights, bias: Floats | None = None) -> Any:
        """Weights [inner, in] of a gated layer; ``bias``: [2 * inner], that of gate first."""

    def table(self, values: Weights) -> Any:
        """An embedding [vocab, hidden], which can be the output layer too."""

    def rotation(self, cos: Floats, sin: Floats) -> Any:
        """``rope.rope_tables`` for all steps."""

    def prepare(self, batch: Batch, cache: KVCache, num_heads: int, rotation: Any) -> Any:
        """What all layers of a step share."""

    def embed(self, table: Any, inputs: Any) -> paddle.Tensor:
        """The rows of the step's tokens: [T, hidden]."""

    def linear(self, x: paddle.Tensor, matrix: Any) -> paddle.Tensor:
        """[T, in] -> [T, out]."""

    def silu_mul(self, x: paddle.Tensor, gated: Any) -> paddle.Tensor:
        """[T, in] -> [T, inner]: silu(x gate) * (x up)."""

    def logits(self, x: paddle.Tensor, table: Any) -> paddle.Tensor:
        """[n, hidden] -> [n, vocab]."""

    def rms_norm(self, x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
        """x / rms(x) * weight over the last axis."""

    def add_rms_norm(
        self, x: paddle.Tensor, residual: paddle.Tensor, weight: paddle.Tensor, epsilon: float
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """``(rms_norm(x + residual), x + residual)``."""

    def layer(
        self,
        x: paddle.Tensor,
        residual: paddle.Tensor | None,
        weights: Layer,
        cache: KVCache,
        index: int,
        inputs: Any,
        config: ModelConfig,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """A decoder layer. ``x`` and ``residual``: what the layer before returned, and nobody has added yet."""

    def attention(
        self, qkv: paddle.Tensor, cache: KVCache, layer: int, inputs: Any, num_heads: int, head_dim: int
    ) -> paddle.Tensor:
        """RoPE, KV write and paged attention. [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads * head_dim]."""


def make_ops(kernels: Path | None, head_dim: int, num_threads: int, board: ThreadBoard | None = None) -> Ops:
    """The compiled operations of a library that ``kernels.build`` made, or those in pure Paddle.

    The latter compute on as many threads as ``runtime.configure`` was told, whatever ``board`` says.
    """
    if kernels is not None and head_dim % 8 == 0:
        from workers.engine.ops.compiled_ops import CompiledOps

        return CompiledOps(kernels, num_threads, board)
    from workers.engine.ops.paddle_ops import PaddleOps

    return PaddleOps()
