"""Seal: what prefill commits to are blocks that were its own from the first write to the digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from app.kv import KVPool
from app.protocol import effects as do
from app.protocol import events as on
from workers.mover import Mover

BLOCKS = (2, 0)


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = KVPool.create(4, 4096, "owner", "layout")
    made.blocks[:] = np.arange(4, dtype=np.uint8)[:, None]
    yield made
    made.close()


def seal(pool: KVPool, generations: tuple[int, ...], known: tuple[str, ...] = ("", ""), **engine: Any) -> Any:
    made: Any = SimpleNamespace(**({"pool": pool, "staged": False} | engine))
    transport: Any = None
    return Mover(made, transport, lambda what: what()).seal(do.Seal("key", BLOCKS, generations, known))


def test_blocks_at_their_generations_are_sealed_with_their_digests(pool: KVPool) -> None:
    taken = tuple(pool.bump(block) for block in BLOCKS)
    sealed = seal(pool, taken)
    assert (sealed.error, sealed.location) == ("", pool.location())
    assert sealed.digests == tuple(digest.hex() for digest in pool.digest(BLOCKS))


def test_a_digest_that_is_known_stands_whatever_the_bytes_are_by_now(pool: KVPool) -> None:
    taken = tuple(pool.bump(block) for block in BLOCKS)
    first = seal(pool, taken).digests
    pool.blocks[:] = 99
    again = seal(pool, taken, (first[0], ""))
    assert again.digests == (first[0], pool.digest(BLOCKS[1:])[0].hex())


@pytest.mark.parametrize("known", [("", ""), ("d", ""), ("d", "d")])
def test_only_what_was_not_sealed_before_is_brought_from_the_device(pool: KVPool, known: tuple[str, str]) -> None:
    taken = tuple(pool.bump(block) for block in BLOCKS)
    exported: list[int] = []
    seal(pool, taken, known, staged=True, export=exported.extend)
    assert exported == [block for block, digest in zip(BLOCKS, known, strict=True) if not digest]


def test_a_known_block_that_was_given_to_its_next_use_is_not_sealed(pool: KVPool) -> None:
    taken = tuple(pool.bump(block) for block in BLOCKS)
    pool.bump(BLOCKS[0])
    assert seal(pool, taken, ("d", "d")).error


def test_a_block_that_was_given_to_its_next_use_is_not_sealed(pool: KVPool) -> None:
    taken = tuple(pool.bump(block) for block in BLOCKS)
    pool.bump(BLOCKS[1])
    assert seal(pool, taken).error


def test_a_block_that_was_given_away_while_it_was_digested_is_not_sealed(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tuple(pool.bump(block) for block in BLOCKS)
    digest = pool.digest

    def meanwhile(blocks: Sequence[int]) -> list[bytes]:
        found = digest(blocks)
        pool.bump(BLOCKS[0])
        return found

    monkeypatch.setattr(pool, "digest", meanwhile)
    assert seal(pool, taken).error


@pytest.mark.parametrize("staged", [False, True])
def test_a_check_tells_what_the_blocks_hold_now_on_a_device_what_lies_there(pool: KVPool, staged: bool) -> None:
    def export(blocks: Sequence[int]) -> None:
        pool.blocks[list(blocks)] = 7

    made: Any = SimpleNamespace(pool=pool, staged=staged, export=export)
    transport: Any = None
    pool.blocks[2] = 99
    checked = Mover(made, transport, lambda what: what()).move(do.Check("key", BLOCKS))
    expected = (7, 7) if staged else (99, 0)
    digests = [xxhash.xxh3_128_hexdigest(bytes([value]) * 4096) for value in expected]
    assert checked == on.Checked("key", tuple(digests))
