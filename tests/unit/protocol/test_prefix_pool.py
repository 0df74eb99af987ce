"""The pool of a prefill node: pins, keys, what is evicted when, and that a block is never under two writers."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from app.protocol.prefix_cache import PrefixPool, block_keys
from app.protocol.tables import BlockState, IllegalStep

KEYS = ("k0", "k1", "k2", "k3")


def computed(pool: PrefixPool, owner: str, keys: Sequence[str], extra: int = 0) -> tuple[int, ...]:
    """``owner`` has computed blocks for ``keys``, and some that are not full."""
    blocks = pool.take(len(keys) + extra, owner, BlockState.RUNNING)
    pool.move(blocks, owner, BlockState.HELD)
    pool.publish(blocks, owner, keys)
    return blocks


def states(pool: PrefixPool, blocks: Sequence[int]) -> list[str]:
    return [pool.owner_of(block)[1] for block in blocks]


# keys


def test_keys_are_a_chain_over_full_blocks() -> None:
    keys = block_keys(range(11), 4, "salt")
    root = hashlib.sha256(b"salt").digest()
    first = hashlib.sha256(root + bytes((0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0))).digest()
    second = hashlib.sha256(first + bytes((4, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0))).digest()
    assert keys == (first.hex(), second.hex())
    assert block_keys(range(3), 4, "salt") == ()


def test_keys_differ_from_the_first_other_token_on_and_for_another_salt() -> None:
    tokens = list(range(16))
    keys = block_keys(tokens, 4, "")
    tokens[5] += 1
    other = block_keys(tokens, 4, "")
    assert [mine == its for mine, its in zip(keys, other, strict=True)] == [True, False, False, False]
    assert set(keys).isdisjoint(block_keys(range(16), 4, "tenant"))


def test_the_same_block_after_another_beginning_has_another_key() -> None:
    keys = block_keys([1, 2, 3, 4, 1, 2, 3, 4], 4, "")
    assert keys[0] != keys[1]


def test_another_process_gives_the_same_keys() -> None:
    code = "from app.protocol.prefix_cache import block_keys; print(*block_keys(range(40), 16, 's'))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert tuple(said) == block_keys(range(40), 16, "s")


# pins


def test_what_nobody_holds_stays_known_and_counts_as_free() -> None:
    pool = PrefixPool(4)
    blocks = computed(pool, "a", KEYS[:2], extra=1)
    assert pool.free == 1
    pool.give_back(blocks, "a")
    assert pool.free == 4
    assert pool.counts() == {"total": 4, "free": 2, "cached": 2}
    assert pool.pin(KEYS, "b") == blocks[:2]
    assert pool.free == 2
    assert states(pool, blocks[:2]) == [BlockState.HELD] * 2
    pool.audit({"b": blocks[:2]})


def test_a_block_is_free_when_the_last_of_its_holders_has_given_it_back() -> None:
    pool = PrefixPool(2)
    (block,) = computed(pool, "a", KEYS[:1])
    assert pool.pin(KEYS, "b") == (block,)
    pool.audit({"a": (block,), "b": (block,)})
    pool.give_back((block,), "a")
    assert states(pool, (block,)) == [BlockState.HELD]
    with pytest.raises(IllegalStep, match="belongs to b"):
        pool.give_back((block,), "a")
    with pytest.raises(IllegalStep, match="wants 2"):
        pool.take(2, "c", BlockState.RUNNING)
    pool.give_back((block,), "b")
    assert states(pool, (block,)) == [BlockState.CACHED]


def test_only_the_leading_keys_are_found() -> None:
    pool = PrefixPool(4)
    blocks = computed(pool, "a", KEYS[:3])
    assert pool.pin(("k0", "other", "k2"), "b") == blocks[:1]
    assert pool.pin(("other", "k1"), "c") == ()


def test_of_two_with_the_same_content_the_first_is_kept() -> None:
    pool = PrefixPool(4)
    first, again = computed(pool, "a", KEYS[:1]), computed(pool, "b", KEYS[:1])
    pool.give_back(again, "b")
    assert states(pool, again) == [BlockState.FREE]
    assert pool.pin(KEYS, "c") == first
    pool.audit({"a": first, "c": first})


@pytest.mark.parametrize("state", [BlockState.RUNNING])
def test_what_a_step_may_still_write_is_not_published(state: BlockState) -> None:
    pool = PrefixPool(2)
    blocks = pool.take(1, "a", state)
    with pytest.raises(IllegalStep, match="not complete"):
        pool.publish(blocks, "a", KEYS)
    pool.give_back(blocks, "a")
    assert pool.pin(KEYS, "b") == ()


def test_a_strangers_block_is_neither_published_nor_digested() -> None:
    pool = PrefixPool(2)
    blocks = pool.take(1, "a", BlockState.RUNNING)
    pool.move(blocks, "a", BlockState.HELD)
    with pytest.raises(IllegalStep, match="belongs to a"):
        pool.publish(blocks, "b", KEYS)
    with pytest.raises(IllegalStep, match="belongs to a"):
        pool.digested(blocks, "b", ("d",))


# generations, digests, eviction


def test_a_cached_block_keeps_generation_and_digest_until_its_next_use() -> None:
    taken: list[int] = []

    def bump(block: int) -> int:
        taken.append(block)
        return len(taken)

    pool = PrefixPool(1, bump)
    (block,) = computed(pool, "a", KEYS[:1])
    pool.digested((block,), "a", ("digest",))
    pool.give_back((block,), "a")
    pool.pin(KEYS, "b")
    assert (pool.generations((block,)), pool.digests((block,))) == ((1,), ("digest",))
    pool.give_back((block,), "b")
    assert taken == [block]
    pool.take(1, "c", BlockState.RUNNING)
    assert (pool.generations((block,)), pool.digests((block,))) == ((2,), ("",))
    assert pool.cache.evicted_blocks == 1


def test_the_longest_unused_is_evicted_and_of_a_prefix_its_end() -> None:
    pool = PrefixPool(4)
    old, new = computed(pool, "a", ("a0", "a1")), computed(pool, "b", ("b0", "b1"))
    pool.give_back(old, "a")
    pool.give_back(new, "b")
    assert pool.pin(("a0",), "again") == old[:1]
    pool.give_back(old[:1], "again")
    order = [pool.take(1, f"t{number}", BlockState.RUNNING)[0] for number in range(4)]
    assert order == [old[1], new[1], new[0], old[0]]


def test_what_is_free_is_taken_before_anything_is_evicted() -> None:
    pool = PrefixPool(3)
    blocks = computed(pool, "a", KEYS[:1])
    pool.give_back(blocks, "a")
    pool.take(2, "b", BlockState.RUNNING)
    assert pool.cache.evicted_blocks == 0
    assert pool.take(1, "c", BlockState.RUNNING) == blocks
    assert pool.pin(KEYS, "d") == ()
    assert pool.cache.evicted_blocks == 1


def test_what_is_in_doubt_is_found_by_nobody_any_more() -> None:
    pool = PrefixPool(3)
    held, cached = computed(pool, "a", KEYS[:1]), computed(pool, "b", ("b0",))
    pool.give_back(cached, "b")
    pool.forget((*held, *cached))
    assert (pool.pin(KEYS, "c"), pool.pin(("b0",), "c")) == ((), ())
    assert states(pool, (*held, *cached)) == [BlockState.HELD, BlockState.FREE]
    pool.give_back(held, "a")
    assert pool.counts() == {"total": 3, "free": 3}
    pool.forget(held)
    pool.audit({})


# sums


def test_the_audit_finds_lost_doubled_and_strange_blocks() -> None:
    pool = PrefixPool(3)
    shared = computed(pool, "a", KEYS[:1])
    pool.pin(KEYS, "b")
    own = pool.take(1, "a", BlockState.RUNNING)
    pool.audit({"a": (*shared, *own), "b": shared})
    for wrong in (
        {"a": shared, "b": shared},
        {"a": (*shared, *own)},
        {"a": (*shared, *own), "b": (*shared, *own)},
        {"a": (*shared, *own, *own), "b": shared},
    ):
        with pytest.raises(IllegalStep):
            pool.audit(wrong)


def test_a_random_walk_agrees_with_a_simpler_cache() -> None:
    """Against a cache that keeps whole contents by key and knows nothing of blocks' states."""
    drawn = random.Random(3)
    pool = PrefixPool(12)
    content: dict[int, str] = {}
    held: dict[str, tuple[tuple[int, ...], tuple[str, ...], bool]] = {}
    for number in range(4000):
        if held and (pool.free < 4 or drawn.random() < 0.5):
            owner = drawn.choice(sorted(held))
            blocks, keys, done = held.pop(owner)
            if not done:
                known = sum(pool.owner_of(block)[1] is BlockState.HELD for block in blocks)
                pool.move(blocks[known:], owner, BlockState.HELD)
                pool.publish(blocks, owner, keys)
                for block, key in zip(blocks, keys, strict=False):
                    content.setdefault(block, key)
                held[owner] = (blocks, keys, True)
            else:
                pool.give_back(blocks, owner)
        else:
            owner, chain = f"o{number}", drawn.choice("xyz")
            keys = tuple(f"{chain}{place}" for place in range(drawn.randint(1, 3)))
            found = pool.pin(keys, owner)
            assert [content[block] for block in found] == list(keys[: len(found)])
            fresh = pool.take(len(keys) + 1 - len(found), owner, BlockState.RUNNING)
            users = {block for blocks, _, _ in held.values() for block in blocks} | set(found)
            assert users.isdisjoint(fresh), "a pinned block was given away"
            for block in fresh:
                content.pop(block, None)
            held[owner] = ((*found, *fresh), keys, False)
        pool.audit({owner: blocks for owner, (blocks, _, _) in held.items()})
        counts = pool.counts()
        total = counts.pop("total")
        assert sum(counts.values()) == total == 12
        assert counts["free"] + counts.get("cached", 0) == pool.free
    assert pool.cache.evicted_blocks > 100


@pytest.mark.parametrize(("found", "intact"), [("abc", 3), ("xbc", 0), ("axc", 1), ("abx", 2)])
def test_blocks_are_intact_up_to_the_first_that_has_changed(found: str, intact: int) -> None:
    pool = PrefixPool(3)
    blocks = pool.take(3, "a", BlockState.RUNNING)
    pool.digested(blocks, "a", tuple("abc"))
    assert pool.intact(blocks, tuple(found)) == intact


def test_what_was_never_digested_is_not_intact() -> None:
    pool = PrefixPool(2)
    blocks = pool.take(2, "a", BlockState.RUNNING)
    pool.digested(blocks, "a", ("a", ""))
    assert pool.intact(blocks, ("a", "")) == 1
