"""Seal: what prefill commits to are blocks that were its own from the first write to the digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.kv import KVPool
from app.protocol import effects as do
from workers.mover import Mover

BLOCKS = (2, 0)


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = KVPool.create(4, 4096, "owner", "layout")
    made.blocks[:] = np.arange(4, dtype=np.uint8)[:, None]
    yield made
    made.close()


def seal(pool: KVPool, generations: tuple[int, ...]) -> Any:
    engine: Any = SimpleNamespace(pool=pool, staged=False)
    transport: Any = None
    return Mover(engine, transport, lambda what: what()).seal(do.Seal("key", BLOCKS, generations))


def test_blocks_at_their_generations_are_sealed_with_their_digests(pool: KVPool) -> None:
    taken = tuple(pool.bump(block) for block in BLOCKS)
    sealed = seal(pool, taken)
    assert (sealed.error, sealed.location) == ("", pool.location())
    assert sealed.digests == tuple(digest.hex() for digest in pool.digest(BLOCKS))


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
