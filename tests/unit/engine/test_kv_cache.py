"""The KV cache and the pool it shares or is staged to. Staging is tried on the CPU as the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from app.errors import StartupError
from app.kv import KVPool
from workers.engine import runtime

if TYPE_CHECKING:
    from workers.engine.kv_cache import KVCache

LAYERS, BLOCK, KV_HEADS, DIM, BLOCKS = 3, 4, 2, 8, 6


@pytest.fixture(params=["float16", "float32"])
def pool(request: pytest.FixtureRequest) -> Iterator[KVPool]:
    """Its layout is no more than the dtype here."""
    block_bytes = LAYERS * 2 * BLOCK * KV_HEADS * DIM * np.dtype(request.param).itemsize
    made = KVPool.create(BLOCKS, block_bytes, "test", request.param)
    yield made
    made.close()


def make_cache(pool: KVPool, *, staged: bool) -> KVCache:
    runtime.configure(1)
    from workers.engine.kv_cache import KVCache

    return KVCache(
        pool,
        num_layers=LAYERS,
        block_size_tokens=BLOCK,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        staged=staged,
        dtype="float16" if pool.layout == "float16" else "float32",
    )


def content(pool: KVPool) -> np.ndarray:
    return pool.blocks.view(pool.layout).reshape(BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM)


def write_everywhere(cache: KVCache) -> np.ndarray:
    """Put a number of its own at each place, through the rows; return what a block-major pool must hold."""
    import paddle

    expected = np.random.default_rng(1).random((BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM), np.float32)
    expected = expected.astype(cache.dtype)
    rows = np.array([block * cache.row_stride + slot for block in range(BLOCKS) for slot in range(BLOCK)])
    for layer in range(LAYERS):
        k, v = (expected[:, layer, which].reshape(BLOCKS * BLOCK, -1).astype(np.float32) for which in (0, 1))
        cache.write(layer, paddle.to_tensor(rows), paddle.to_tensor(k), paddle.to_tensor(v))
    return expected


def test_rows_and_heads_address_the_pool_block_by_block(pool: KVPool) -> None:
    cache = make_cache(pool, staged=False)
    assert not pool.blocks.any()
    expected = write_everywhere(cache)
    np.testing.assert_array_equal(content(pool), expected)
    head_row = (4 * cache.row_stride + 3) * KV_HEADS + 1
    import paddle

    k, v = cache.read_heads(2, paddle.to_tensor([head_row, 1]))
    for found, which in ((k, 0), (v, 1)):
        assert found.dtype == paddle.float32
        np.testing.assert_array_equal(found.numpy(), expected[[4, 0], 2, which, [3, 0], 1])
    np.testing.assert_array_equal(cache.v_rows[2][4 * cache.row_stride + 3].numpy(), expected[4, 2, 1, 3].reshape(-1))


def test_staged_blocks_reach_the_pool_only_by_export(pool: KVPool) -> None:
    cache = make_cache(pool, staged=True)
    expected = write_everywhere(cache)
    assert not pool.blocks.any()
    cache.export([1, 4])
    np.testing.assert_array_equal(content(pool)[[1, 4]], expected[[1, 4]])
    assert not content(pool)[[0, 2, 3, 5]].any()


def test_staged_blocks_are_taken_over_only_by_import(pool: KVPool) -> None:
    cache = make_cache(pool, staged=True)
    before = write_everywhere(cache)
    content(pool)[:] = 3
    cache.import_([5])
    content(pool)[:] = 0
    cache.export(range(BLOCKS))
    np.testing.assert_array_equal(content(pool)[:5], before[:5])
    assert (content(pool)[5] == 3).all()


def test_a_paddle_that_copies_the_pool_is_refused(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cache(pool, staged=False)
    import paddle

    alias = paddle.utils.dlpack.from_dlpack
    copying: Any = lambda array: alias(array.copy())  # noqa: E731
    monkeypatch.setattr(paddle.utils.dlpack, "from_dlpack", copying)
    with pytest.raises(StartupError, match="copied the KV pool"):
        make_cache(pool, staged=False)


def test_a_view_that_is_a_copy_is_refused(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cache(pool, staged=False)
    import paddle

    reshape = paddle.Tensor.reshape
    monkeypatch.setattr(paddle.Tensor, "reshape", lambda tensor, shape: reshape(tensor, shape).clone())
    with pytest.raises(StartupError, match="copied a view"):
        make_cache(pool, staged=False)
