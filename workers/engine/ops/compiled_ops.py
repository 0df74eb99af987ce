"""The operations of a step as compiled kernels (``kernels/csrc``) on CPU tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import paddle
from paddle import _C_ops

from app.model.config import ModelConfig
from workers.engine.batch import Batch
from workers.engine.kernels.load import level, load_kernels, set_threads
from workers.engine.kv_cache import KVCache
from workers.engine.ops.arena import Arena
from workers.engine.ops.by_ops import layer_by_ops
from workers.engine.ops.step_inputs import InputBuffers
from workers.engine.ops.weights import Layer
from workers.engine.thread_board import ThreadBoard

Weights = npt.NDArray[np.float16] | npt.NDArray[np.float32]
Floats = npt.NDArray[np.float32]

PANEL = 32
"""Output features that lie beside each other in memory: kPanel of the kernels."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights in panels [panels, in, 32], padded with zeros; float16 or float32."""

    panels: paddle.Tensor
    bias: paddle.Tensor | None
    """[panels, 32]"""
    num_out: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What every layer of a step shares: see ``Batch``."""

    token_ids: paddle.Tensor
    positions: paddle.Tensor
    write_rows: paddle.Tensor
    spans: paddle.Tensor
    tables: paddle.Tensor
    cos: paddle.Tensor
    sin: paddle.Tensor


class CompiledOps:
    """Each method calls one operator of the library; ``layer`` is made of what the others call, in C++."""

    def __init__(self, library: Path, num_threads: int = 1, board: ThreadBoard | None = None) -> None:
        load_kernels(library)
        set_threads(library, num_threads, board)
        self.name = f"compiled kernels ({level(library)})"
        self._arena = Arena()
        self._inputs = InputBuffers()
        self._call = _C_ops._run_custom_op

    def vector(self, values: Floats) -> paddle.Tensor:
        return paddle.to_tensor(values)

    def matrix(self, parts: list[Weights], bias: Floats | None = None) -> Matrix:
        weights = np.concatenate(parts)
        padded = None if bias is None else _panels(bias[:, None], PANEL)[:, 0]
        return Matrix(
            self._arena.copy(_panels(weights, PANEL)),
            None if padded is None else paddle.to_tensor(padded),
            len(weights),
        )

    def gated(self, gate: Weights, up: Weights, bias: Floats | None = None) -> Matrix:
        """The first half of each panel is gate, the second up: the kernel has both in registers."""
        panels = _interleaved(gate, up)
        biases = None
        if bias is not None:
            of_gate, of_up = bias[: len(gate), None], bias[len(gate) :, None]
            biases = paddle.to_tensor(np.ascontiguousarray(_interleaved(of_gate, of_up)[:, 0]))
        return Matrix(self._arena.copy(panels), biases, len(gate))

    def table(self, values: Weights) -> Matrix:
        return self.matrix([values])

    def rotation(self, cos: Floats, sin: Floats) -> tuple[paddle.Tensor, paddle.Tensor]:
        return paddle.to_tensor(cos), paddle.to_tensor(sin)

    def prepare(
        self, batch: Batch, cache: KVCache, num_heads: int, rotation: tuple[paddle.Tensor, paddle.Tensor]
    ) -> StepInputs:
        names = ("token_ids", "positions", "write_rows", "spans", "tables")
        return StepInputs(*(self._inputs.tensor(name, getattr(batch, name)) for name in names), *rotation)

    def embed(self, table: Matrix, inputs: StepInputs) -> paddle.Tensor:
        return self._call("baton_embed", inputs.token_ids, table.panels)[0]

    def linear(self, x: paddle.Tensor, matrix: Matrix) -> paddle.Tensor:
        return self._call("baton_linear", x, matrix.panels, matrix.bias, matrix.num_out, False)[0]

    def silu_mul(self, x: paddle.Tensor, gated: Matrix) -> paddle.Tensor:
        return self._call("baton_linear", x, gated.panels, gated.bias, gated.num_out, True)[0]

    def logits(self, x: paddle.Tensor, table: Matrix) -> paddle.Tensor:
        return self.linear(x, table)

    def rms_norm(self, x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
        return self._call("baton_rms_norm", x, weight, epsilon)[0]

    def add_rms_norm(
        self, x: paddle.Tensor, residual: paddle.Tensor, weight: paddle.Tensor, epsilon: float
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        normed, added = self._call("baton_add_rms_norm", x, residual, weight, epsilon)
        return normed, added

    def layer(
        self,
        x: paddle.Tensor,
        residual: paddle.Tensor | None,
        weights: Layer,
        cache: KVCache,
        index: int,
        inputs: StepInputs,
        config: ModelConfig,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        biased = any(matrix.bias is not None for matrix in (weights.o, weights.gate_up, weights.down))
        if biased or weights.q_norm is not None:
            return layer_by_ops(self, x, residual, weights, cache, index, inputs, config)
        out, added = self._call(
            "baton_layer",
            x,
            weights.input_norm,
            weights.qkv.panels,
            weights.o.panels,
            weights.post_norm,
            weights.gate_up.panels,
            weights.down.panels,
            cache.k_rows[index],
            cache.v_rows[index],
            inputs.cos,
            inputs.sin,
            inputs.positions,
            inputs.write_rows,
            inputs.spans,
            inputs.tables,
            residual,
            weights.qkv.bias,
            config.num_heads,
            cache.num_kv_heads,
            cache.block_size_tokens,
            cache.row_stride,
            config.rms_norm_eps,
        )
        return out, added

    def attention(
        self, qkv: paddle.Tensor, cache: KVCache, layer: int, inputs: StepInputs, num_heads: int, head_dim: int
    ) -> paddle.Tensor:
        return self._call(
            "baton_attention",
            qkv,
            cache.k_rows[layer],
            cache.v_rows[layer],
            inputs.cos,
            inputs.sin,
            inputs.positions,
            inputs.write_rows,
            inputs.spans,
            inputs.tables,
            num_heads,
            cache.num_kv_heads,
            cache.block_size_tokens,
            cache.row_stride,
        )[0]


def _interleaved(gate: Weights, up: Weights) -> Weights:
    return np.concatenate([_panels(gate, PANEL // 2), _panels(up, PANEL // 2)], axis=2)


def _panels(weights: Weights, width: int) -> Weights:
    """[out, in] -> [panels, in, width]."""
    num_out, num_in = weights.shape
    count = -(-num_out // width)
    padded = np.zeros((count * width, num_in), weights.dtype)
    padded[:num_out] = weights
    return np.ascontiguousarray(padded.reshape(count, width, num_in).transpose(0, 2, 1))
