"""The fingerprint that two nodes must share before one reads the other's KV blocks."""

from __future__ import annotations

from typing import Literal

KVDtype = Literal["float16", "float32"]
ITEM_BYTES: dict[KVDtype, int] = {"float16": 2, "float32": 4}
"""Of one number of K or V."""


def kv_layout(
    *, model: str, dtype: KVDtype, num_layers: int, num_kv_heads: int, head_dim: int, block_size_tokens: int
) -> str:
    """Describe what the bytes of a block mean: for which model, and in which order.

    ``model`` names the weights (name and digest), so that nodes with other weights of the same shape refuse
    each other too. The order of a block is [layers, 2 (K, V), block_size, kv_heads, head_dim].
    """
    return (
        f"kv1 model={model} dtype={dtype} layers={num_layers} kv_heads={num_kv_heads} "
        f"head_dim={head_dim} block_size={block_size_tokens}"
    )


def block_bytes_of(dtype: KVDtype, *, num_layers: int, num_kv_heads: int, head_dim: int, block_size_tokens: int) -> int:
    """Bytes of one block: K and V of all layers."""
    return num_layers * 2 * block_size_tokens * num_kv_heads * head_dim * ITEM_BYTES[dtype]
