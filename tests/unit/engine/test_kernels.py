"""Each compiled kernel against float64 and against pure Paddle, at every processor level that runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from app.kv import KVPool
from app.kv.layout import KVDtype, block_bytes_of
from app.protocol.blocks import blocks_for
from app.schemas import SamplingParams
from workers.engine import runtime
from workers.engine.batch import Batch, build_batch
from workers.engine.rope import rope_tables
from workers.engine.scheduler import Chunk
from workers.engine.sequence import Sequence

from .conftest import TINY

if TYPE_CHECKING:
    import paddle

    from workers.engine.kv_cache import KVCache
    from workers.engine.ops.compiled_ops import CompiledOps
    from workers.engine.ops.paddle_ops import PaddleOps

Floats = np.ndarray[Any, np.dtype[np.float32]]
LEVELS = ("portable", "avx2", "avx512")


@dataclass
class Both:
    """The operations twice."""

    compiled: CompiledOps
    plain: PaddleOps
    set_level: Callable[[str], bool]

    def tensor(self, values: Floats) -> paddle.Tensor:
        return self.compiled.vector(values)


@pytest.fixture(scope="module")
def every_level(kernels: Path) -> Both:
    runtime.configure(1)
    from workers.engine.kernels.load import set_level
    from workers.engine.ops.compiled_ops import CompiledOps
    from workers.engine.ops.paddle_ops import PaddleOps

    return Both(CompiledOps(kernels), PaddleOps(), lambda name: set_level(kernels, name))


@pytest.fixture(params=LEVELS)
def both(every_level: Both, request: pytest.FixtureRequest) -> Iterator[Both]:
    """The compiled operations at one level."""
    if not every_level.set_level(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield every_level
    best = next(level for level in reversed(LEVELS) if every_level.set_level(level))
    assert best


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


# Products

ROWS = (1, 2, 3, 5, 8, 12, 13, 31, 64, 97, 200)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("num_in", "outs"), [(8, (1,)), (48, (31, 33)), (130, (64,)), (576, (40, 24, 7)), (300, (5,))])
def test_linear(both: Both, dtype: type, num_in: int, outs: tuple[int, ...]) -> None:
    rng = np.random.default_rng(num_in)
    parts = [(normal(rng, out, num_in) / np.sqrt(num_in, dtype=np.float32)).astype(dtype) for out in outs]
    bias = normal(rng, sum(outs))
    for rows in ROWS:
        x = normal(rng, rows, num_in)
        for own_bias in (None, bias):
            expected = x.astype(np.float64) @ np.concatenate(parts).astype(np.float64).T
            expected = expected if own_bias is None else expected + own_bias
            found = both.compiled.linear(both.tensor(x), both.compiled.matrix(parts, own_bias)).numpy()
            plain = both.plain.linear(both.tensor(x), both.plain.matrix(parts, own_bias)).numpy()
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(found, plain, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("num_in", "inner"), [(8, 1), (48, 80), (130, 33), (576, 1536)])
def test_silu_mul(both: Both, dtype: type, num_in: int, inner: int) -> None:
    rng = np.random.default_rng(inner)
    gate, up = ((3 * normal(rng, inner, num_in) / np.sqrt(num_in, dtype=np.float32)).astype(dtype) for _ in range(2))
    for rows in (1, 7, 40, 130):
        x = normal(rng, rows, num_in)
        wide = x.astype(np.float64)
        product = wide @ gate.astype(np.float64).T
        expected = product * sigmoid(product) * (wide @ up.astype(np.float64).T)
        found = both.compiled.silu_mul(both.tensor(x), both.compiled.gated(gate, up)).numpy()
        plain = both.plain.silu_mul(both.tensor(x), both.plain.gated(gate, up)).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=3e-5)
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=3e-5)


def test_shapes_that_do_not_fit_are_refused(every_level: Both) -> None:
    """Nothing may be read beyond a tensor's end."""
    ops = every_level.compiled
    x, weight = ops.vector(np.ones((2, 8), np.float32)), np.ones((40, 8), np.float32)
    for wrong in (
        lambda: ops.linear(ops.vector(np.ones((2, 9), np.float32)), ops.matrix([weight])),
        lambda: ops.linear(x, replace(ops.matrix([weight]), num_out=65)),
        lambda: ops.linear(x, replace(ops.matrix([weight]), bias=ops.vector(np.ones(40, np.float32)))),
        lambda: ops.silu_mul(x, replace(ops.gated(weight, weight), num_out=64)),
        lambda: ops.linear(x, replace(ops.matrix([weight]), panels=ops.vector(np.ones((2, 8, 32), np.float64)))),
        lambda: ops.rms_norm(x, ops.vector(np.ones(9, np.float32)), 1e-5),
        lambda: ops.add_rms_norm(x, ops.vector(np.ones((1, 8), np.float32)), ops.vector(np.ones(8, np.float32)), 1e-5),
    ):
        with pytest.raises(Exception, match="Baton kernel"):
            wrong()


def test_silu_of_large_and_of_no_numbers(both: Both) -> None:
    """x is [1, 1], so that the gate is x itself; up is 1."""
    one = np.ones((1, 1), np.float32)
    gated = both.compiled.gated(one, one)
    for value in (-1e30, -200.0, -88.0, -1e-3, 0.0, 1e-3, 20.0, 88.0, 200.0, 1e18):
        found = float(both.compiled.silu_mul(both.tensor(np.full((1, 1), value, np.float32)), gated).numpy()[0, 0])
        expected = value * value / (1 + np.exp(-min(max(value, -700), 700)))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8 if value > -1e20 else 1e30)
    for value in (np.nan, np.inf):
        found = both.compiled.silu_mul(both.tensor(np.full((1, 1), value, np.float32)), gated).numpy()
        assert not np.isfinite(found).any(), "the engine must see that a step went wrong"


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_embedding_and_logits_share_a_table(both: Both, dtype: type) -> None:
    rng = np.random.default_rng(2)
    values = normal(rng, 203, 72).astype(dtype)
    table = both.compiled.table(values)
    ids = rng.permutation(203)[:50]
    chunk = Chunk(Sequence("a", ids.tolist(), [], SAMPLING, list(range(20)), 0, one_token=False), 0, 50)
    paged = Paged(np.random.default_rng(0), [(0, 1)], 8, 1, 4, both)
    inputs = both.compiled.prepare(
        build_batch([chunk], block_size_tokens=4, row_stride=8), paged.cache, 1, paged.rotation
    )
    np.testing.assert_array_equal(both.compiled.embed(table, inputs).numpy(), values[ids].astype(np.float32))
    x = normal(rng, 3, 72)
    np.testing.assert_allclose(
        both.compiled.logits(both.tensor(x), table).numpy(), x @ values.astype(np.float32).T, atol=2e-4
    )


# Norms


@pytest.mark.parametrize("size", [8, 32, 40, 576, 1001])
def test_norms(both: Both, size: int) -> None:
    rng = np.random.default_rng(size)
    weight, epsilon = normal(rng, size), 1e-5
    for rows in (1, 3, 64):
        x, residual = 3 * normal(rng, rows, size), normal(rng, rows, size)

        def norm(values: np.ndarray) -> np.ndarray:
            return values / np.sqrt((values.astype(np.float64) ** 2).mean(-1, keepdims=True) + epsilon) * weight

        found = both.compiled.rms_norm(both.tensor(x), both.tensor(weight), epsilon).numpy()
        np.testing.assert_allclose(found, norm(x), rtol=2e-6, atol=1e-6)
        normed, added = both.compiled.add_rms_norm(both.tensor(x), both.tensor(residual), both.tensor(weight), epsilon)
        np.testing.assert_array_equal(added.numpy(), x + residual)
        np.testing.assert_allclose(normed.numpy(), norm(x + residual), rtol=2e-6, atol=1e-6)


# Attention

SAMPLING = SamplingParams(seed=0, max_tokens=1)


class Paged:
    """Sequences with some tokens computed and some new ones, in scattered blocks of a cache of one layer of two."""

    def __init__(
        self,
        rng: np.random.Generator,
        shapes: list[tuple[int, int]],
        dim: int,
        kv_heads: int,
        block: int,
        both: Both,
        dtype: KVDtype = "float32",
    ) -> None:
        """``shapes``: (computed, new) tokens of each sequence."""
        from workers.engine.kv_cache import KVCache

        self.shapes, self.dim, self.kv_heads, self.block = shapes, dim, kv_heads, block
        totals = [computed + new for computed, new in shapes]
        num_blocks = sum(blocks_for(total, block) for total in totals) + 3
        free = rng.permutation(num_blocks).tolist()
        self.tables = [[free.pop() for _ in range(blocks_for(total, block))] for total in totals]
        self.keys = [normal(rng, total, kv_heads, dim) for total in totals]
        self.values = [normal(rng, total, kv_heads, dim) for total in totals]
        self.cos, self.sin = rope_tables(replace(TINY, head_dim=dim), max(totals))
        self.rotation = both.compiled.rotation(self.cos, self.sin)
        shape = {"num_layers": 2, "block_size_tokens": block, "num_kv_heads": kv_heads, "head_dim": dim}
        self.pool = KVPool.create(num_blocks, block_bytes_of(dtype, **shape), "test", "layout")
        self.cache: KVCache = KVCache(self.pool, staged=False, dtype=dtype, **shape)
        self.host = self.pool.blocks.view(dtype).reshape(num_blocks, 2, 2, block, kv_heads, dim)
        self.host[:] = np.nan  # what nobody wrote must not be read
        for table, (computed, _), keys, values in zip(self.tables, shapes, self.keys, self.values, strict=True):
            for position in range(computed):
                slot = self.host[table[position // block], 1, :, position % block]
                slot[0], slot[1] = self.rotate(keys[position], position), values[position]

    def rotate(self, heads: Floats, position: int) -> np.ndarray:
        rolled = np.roll(heads, self.dim // 2, axis=-1)
        rotated: np.ndarray = heads * self.cos[position] + rolled * self.sin[position]
        return rotated

    def batch(self) -> Batch:
        chunks = []
        for number, ((computed, new), table) in enumerate(zip(self.shapes, self.tables, strict=True)):
            tokens = [number] * (computed + new)
            sequence = Sequence(str(number), tokens, [], SAMPLING, table, computed, one_token=False)
            chunks.append(Chunk(sequence, computed, new))
        return build_batch(chunks, block_size_tokens=self.block, row_stride=self.cache.row_stride)

    def qkv(self, queries: list[Floats]) -> Floats:
        """[T, (heads + 2 kv_heads) * dim] in the order of ``batch``."""
        rows = []
        for chunk in self.batch().chunks:
            number = int(chunk.sequence.key)
            new = slice(chunk.start, chunk.end)
            parts = (queries[number], self.keys[number][new], self.values[number][new])
            rows.append(np.concatenate([part.reshape(chunk.num_tokens, -1) for part in parts], axis=1))
        return np.concatenate(rows)

    def stored(self, number: int, which: int) -> np.ndarray:
        """What the cache holds of a sequence: its keys (0) or values (1), [tokens, kv_heads, dim]."""
        places = [(self.tables[number][p // self.block], p % self.block) for p in range(sum(self.shapes[number]))]
        return np.stack([self.host[block, 1, which, slot] for block, slot in places])

    def check_stored(self) -> None:
        """Rounded once, to what numpy rounds to; where the last bit of a rotation decides, to its neighbour."""
        half = self.host.dtype == np.float16
        for number, values in enumerate(self.values):
            np.testing.assert_array_equal(self.stored(number, 1), values.astype(self.host.dtype))
            keys = np.stack([self.rotate(k, p) for p, k in enumerate(self.keys[number])])
            found, expected = self.stored(number, 0), keys.astype(self.host.dtype)
            # A float16 of size 1 has 2^-10 to its neighbour, half of that to what is rounded to it.
            np.testing.assert_allclose(found, keys, rtol=2**-11 * 1.01 if half else 1e-5, atol=1e-6)
            assert not half or (found != expected).mean() < 0.01

    def expected(self, queries: list[Floats]) -> np.ndarray:
        """Float64, one token and one head at a time, over what the cache holds."""
        out = []
        for chunk in self.batch().chunks:
            number = int(chunk.sequence.key)
            keys, values = (self.stored(number, which).astype(np.float64) for which in (0, 1))
            group = queries[number].shape[1] // self.kv_heads
            for offset, query in enumerate(queries[number]):
                end = chunk.start + offset + 1
                rotated = self.rotate(query, end - 1).astype(np.float64)
                heads = []
                for head, vector in enumerate(rotated):
                    scores = keys[:end, head // group] @ vector / np.sqrt(self.dim)
                    chances = np.exp(scores - scores.max())
                    heads.append(chances / chances.sum() @ values[:end, head // group])
                out.append(np.concatenate(heads))
        return np.stack(out)


@pytest.mark.parametrize(
    ("dim", "kv_heads", "group", "block", "shapes"),
    [
        (64, 3, 3, 16, [(100, 1), (0, 1), (31, 1), (32, 1), (63, 1), (0, 70), (33, 40)]),
        (8, 2, 3, 4, [(5, 1), (0, 9), (40, 50)]),
        (16, 1, 8, 7, [(0, 1), (95, 1), (20, 33)]),
        (24, 2, 1, 1, [(10, 3), (70, 1)]),
        (40, 1, 1, 32, [(0, 130)]),
        (72, 4, 2, 64, [(63, 2), (64, 1), (1, 64)]),
        (80, 1, 5, 5, [(37, 1), (0, 33)]),
        (96, 2, 4, 16, [(500, 1), (490, 20)]),
        (128, 1, 7, 256, [(300, 1), (0, 40)]),
        (256, 1, 2, 16, [(17, 1), (17, 17)]),
        (104, 1, 100, 16, [(3, 1), (0, 5)]),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_attention(
    both: Both, dim: int, kv_heads: int, group: int, block: int, shapes: list[tuple[int, int]], dtype: KVDtype
) -> None:
    check_attention(both, np.random.default_rng(dim), shapes, dim, kv_heads, group, block, dtype)


@pytest.mark.parametrize("seed", range(5))
def test_attention_over_halves_of_random_shapes(both: Both, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dim, kv_heads, group, block = 8 * rng.integers(1, 17), rng.integers(1, 5), rng.integers(1, 6), rng.integers(1, 40)
    shapes = [(int(rng.integers(0, 150)), int(rng.choice([1, 1, rng.integers(2, 80)]))) for _ in range(5)]
    check_attention(both, rng, shapes, int(dim), int(kv_heads), int(group), int(block), "float16")


def check_attention(
    both: Both,
    rng: np.random.Generator,
    shapes: list[tuple[int, int]],
    dim: int,
    kv_heads: int,
    group: int,
    block: int,
    dtype: KVDtype,
) -> None:
    """Compiled and in pure Paddle, both against float64."""
    paged = Paged(rng, shapes, dim, kv_heads, block, both, dtype)
    heads = kv_heads * group
    queries = [normal(rng, new, heads, dim) for _, new in shapes]
    batch, qkv = paged.batch(), both.tensor(paged.qkv(queries))
    inputs = both.compiled.prepare(batch, paged.cache, heads, paged.rotation)
    found = both.compiled.attention(qkv, paged.cache, 1, inputs, heads, dim).numpy()
    assert np.isnan(paged.host[:, 0]).all(), "another layer's KV was written"
    paged.check_stored()
    np.testing.assert_allclose(found, paged.expected(queries), rtol=0, atol=3e-6 * dim**0.5)
    last = np.isnan(paged.host[:, 1, 1, :, 0, 0]).sum()
    assert last == paged.host.shape[0] * block - sum(map(sum, shapes)), "something else was written"
    plain_inputs = both.plain.prepare(batch, paged.cache, heads, (paged.cos, paged.sin))
    np.nan_to_num(paged.host, copy=False)
    plain = both.plain.attention(qkv, paged.cache, 1, plain_inputs, heads, dim).numpy()
    paged.check_stored()
    np.testing.assert_allclose(plain, paged.expected(queries), rtol=0, atol=3e-6 * dim**0.5)
    paged.pool.close()


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("size", [65520.0, -1e30])
def test_what_a_half_cannot_hold_is_no_number_in_the_answer(both: Both, which: str, size: float) -> None:
    """An infinite key could quietly take its token out of the answer, or out-shout all others."""
    for ops in (both.compiled, both.plain):
        paged = Paged(np.random.default_rng(1), [(0, 3)], 16, 2, 4, both, "float16")
        (paged.keys if which == "key" else paged.values)[0][0, 1, 5] = size
        queries = [normal(np.random.default_rng(2), 3, 4, 16)]
        rotation = paged.rotation if ops is both.compiled else (paged.cos, paged.sin)
        inputs = ops.prepare(paged.batch(), paged.cache, 4, rotation)
        found = ops.attention(both.tensor(paged.qkv(queries)), paged.cache, 1, inputs, 4, 16).numpy()
        found = found.reshape(3, 2, 2, 16)
        assert np.isnan(paged.stored(0, 0 if which == "key" else 1)[0, 1, 5])
        assert np.isnan(found[:, 1]).any(axis=-1).all()
        assert np.isfinite(found[:, 0]).all()
        paged.pool.close()


def test_halves_are_rounded_to_the_nearest_even(both: Both) -> None:
    """Through V of a token that sees only itself: what is written, and what is read back."""
    bits = np.arange(0x7C00, dtype=np.uint16)
    exact = bits.view(np.float16).astype(np.float32)
    between = (exact[:-1].astype(np.float64) + exact[1:]).astype(np.float32) / 2
    values = np.concatenate([exact, between, np.nextafter(between, np.float32(np.inf)), [65519.0, 1e-9, 0.0, 0.0]])
    values = np.concatenate([values, -values]).astype(np.float32)
    values = values[: len(values) // 8 * 8]
    heads = len(values) // 8
    rounded = values.astype(np.float16)
    qkv = np.concatenate([np.zeros(2 * len(values), np.float32), values])[None, :]
    for ops in (both.compiled, both.plain):
        paged = Paged(np.random.default_rng(0), [(0, 1)], 8, heads, 1, both, "float16")
        inputs = ops.prepare(
            paged.batch(), paged.cache, heads, paged.rotation if ops is both.compiled else (paged.cos, paged.sin)
        )
        found = ops.attention(both.tensor(qkv), paged.cache, 1, inputs, heads, 8).numpy()
        np.testing.assert_array_equal(paged.stored(0, 1).reshape(-1).view(np.uint16), rounded.view(np.uint16))
        np.testing.assert_array_equal(found[0], rounded.astype(np.float32))
        paged.pool.close()
