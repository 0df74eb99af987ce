"""The block pool: sums, owners, states, generations."""

from __future__ import annotations

import random

import pytest

from app.protocol.blocks import BlockPool, blocks_for
from app.protocol.tables import DECODE_BLOCK_STEPS, PREFILL_BLOCK_STEPS, BlockState, IllegalStep


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_a_block_is_bumped_before_its_next_use_and_only_then() -> None:
    bumped: list[int] = []

    def bump(block: int) -> int:
        bumped.append(block)
        return len(bumped)

    pool = BlockPool(4, PREFILL_BLOCK_STEPS, bump)
    first = pool.take(2, "a", BlockState.RUNNING)
    pool.move(first, "a", BlockState.HELD)
    pool.give_back(first, "a")
    assert bumped == list(first)
    assert pool.generations(first) == (1, 2)
    pool.take(4, "b", BlockState.RUNNING)
    assert sorted(bumped) == sorted([*first, 0, 1, 2, 3])


def test_the_longest_free_block_is_taken_first_so_that_late_readers_meet_reuse_late() -> None:
    pool = BlockPool(4, DECODE_BLOCK_STEPS)
    a = pool.take(2, "a", BlockState.RESERVED)
    pool.give_back(a, "a")
    assert set(pool.take(2, "b", BlockState.RESERVED)).isdisjoint(a)


def test_nothing_is_freed_twice_or_by_a_stranger() -> None:
    pool = BlockPool(2, DECODE_BLOCK_STEPS)
    blocks = pool.take(1, "a", BlockState.RESERVED)
    with pytest.raises(IllegalStep, match="belongs to a"):
        pool.give_back(blocks, "b")
    pool.give_back(blocks, "a")
    with pytest.raises(IllegalStep):
        pool.give_back(blocks, "a")
    assert pool.counts() == {"total": 2, "free": 2}


def test_more_than_is_free_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(2, DECODE_BLOCK_STEPS)
    with pytest.raises(IllegalStep, match="wants 3"):
        pool.take(3, "a", BlockState.RESERVED)
    assert pool.free == 2


@pytest.mark.parametrize("busy", [BlockState.PULLING, BlockState.IN_STEP])
def test_the_table_has_no_way_from_reserved_past_the_mover_or_the_step(busy: BlockState) -> None:
    assert BlockState.IN_STEP not in DECODE_BLOCK_STEPS[BlockState.RESERVED]
    assert BlockState.READY not in DECODE_BLOCK_STEPS[BlockState.RESERVED]
    assert BlockState.FREE in DECODE_BLOCK_STEPS[busy]


def test_the_audit_finds_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(3, DECODE_BLOCK_STEPS)
    blocks = pool.take(2, "a", BlockState.RESERVED)
    pool.audit({"a": blocks})
    with pytest.raises(IllegalStep, match="!= 3"):
        pool.audit({"a": blocks[:1]})
    with pytest.raises(IllegalStep, match="twice"):
        pool.audit({"a": blocks, "b": blocks})


def test_counts_follow_a_random_walk_through_the_table() -> None:
    random_ = random.Random(7)
    pool = BlockPool(20, DECODE_BLOCK_STEPS)
    held: dict[str, tuple[int, ...]] = {}
    for number in range(2000):
        if pool.free and random_.random() < 0.4:
            owner = f"o{number}"
            held[owner] = pool.take(random_.randint(1, pool.free), owner, BlockState.RESERVED)
        elif held:
            owner = random_.choice(list(held))
            _, state = pool.owner_of(held[owner][0])
            step = random_.choice(sorted(DECODE_BLOCK_STEPS[state]))
            if step is BlockState.FREE:
                pool.give_back(held.pop(owner), owner)
            else:
                pool.move(held[owner], owner, step)
        pool.audit(held)
        counts = pool.counts()
        total = counts.pop("total")
        assert sum(counts.values()) == total == 20
        assert counts["free"] == pool.free
