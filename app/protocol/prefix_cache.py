"""The prefix cache of a prefill node: which blocks still hold the KV of which tokens. Pure, as the pool it extends.

A full block is known by the key of all tokens up to its end. Its KV depends on nothing else, so whoever begins with the
same tokens may start after it. Only blocks whose KV a step has written to the end without an error get a key; a block
that somebody uses is pinned, and is neither given away nor written to. Each is digested before its first holder lets go
of it, and compared with that digest before anybody starts from it: memory that went bad meanwhile costs time only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.protocol.blocks import BlockPool
from app.protocol.tables import PREFILL_BLOCK_STEPS, BlockState, IllegalStep


def block_keys(token_ids: Sequence[int], block_size_tokens: int, salt: str) -> tuple[str, ...]:
    """The key of each full block of ``token_ids``: SHA-256 over the key before it and the block's tokens.

    The same in every process. It begins with ``salt``: who does not know another tenant's salt can neither hit nor time
    that tenant's blocks. Two different beginnings with one key are a collision of SHA-256, which nobody can find: the
    tokens themselves are not compared.
    """
    keys: list[str] = []
    parent = hashlib.sha256(salt.encode()).digest()
    block = struct.Struct(f"<{block_size_tokens}I")
    for start in range(0, len(token_ids) - block_size_tokens + 1, block_size_tokens):
        parent = hashlib.sha256(parent + block.pack(*token_ids[start : start + block_size_tokens])).digest()
        keys.append(parent.hex())
    return tuple(keys)


@dataclass(slots=True)
class CacheCounts:
    """What the cache has done since the process started."""

    prompts: int = 0
    """That entered the engine."""
    hits: int = 0
    """Those of them that did not start at the first token."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    """Read from blocks instead of computed."""
    evicted_blocks: int = 0
    corrupted_blocks: int = 0
    """Whose bytes were not those that had been digested: dropped, and computed anew."""

    def started(self, num_tokens: int, num_computed: int) -> None:
        """A prompt of ``num_tokens`` enters the engine, the first ``num_computed`` of which it need not compute."""
        self.prompts += 1
        self.hits += num_computed > 0
        self.computed_tokens += num_tokens - num_computed
        self.cached_tokens += num_computed


class PrefixPool(BlockPool):
    """The block pool of a prefill node: blocks may be shared, and stay known when nobody holds them.

    RUNNING blocks have one holder, who may write them. HELD blocks have one or more, all of whom read. What nobody
    holds is CACHED if it has a key, else FREE; the longest unused CACHED block is the first to be taken for something
    new. A block keeps its generation, and what was found to be its digest, until then (rule 6).
    """

    def __init__(self, num_blocks: int, on_take: Callable[[int], int] = lambda block: 0) -> None:
        super().__init__(num_blocks, PREFILL_BLOCK_STEPS, on_take)
        self.cache = CacheCounts()
        self._holders: list[tuple[str, ...]] = [()] * num_blocks
        """Who has pinned each block."""
        self._key = [""] * num_blocks
        self._digest = [""] * num_blocks
        self._block_of: dict[str, int] = {}
        """By key; of two blocks with the same content the first one."""
        self._cached: dict[int, None] = {}
        """CACHED blocks, the longest unused first."""

    @property
    def free(self) -> int:
        """Blocks that can be taken now: what is cached makes room."""
        return len(self._free) + len(self._cached)

    def take(self, count: int, owner: str, state: BlockState) -> tuple[int, ...]:
        """See ``BlockPool.take``; forgets cached content where no block is free."""
        if count > self.free:
            raise IllegalStep(f"{owner} wants {count} blocks, {self.free} are free")
        while len(self._free) < count:
            self._forget(next(iter(self._cached)))
            self.cache.evicted_blocks += 1
        return super().take(count, owner, state)

    def pin(self, keys: Sequence[str], owner: str) -> tuple[int, ...]:
        """Hold the blocks of the leading ``keys`` that are known, up to the first that is not."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            if self._state[block] is BlockState.CACHED:
                del self._cached[block]
                self._move(block, BlockState.HELD)
            self._hold(block, owner)
            blocks.append(block)
        return tuple(blocks)

    def publish(self, blocks: Sequence[int], owner: str, keys: Sequence[str]) -> None:
        """``owner``'s HELD blocks hold the KV of ``keys``, complete. Blocks past the last key are not full."""
        for block, key in zip(blocks, keys, strict=False):
            self._check_owner(block, owner)
            if self._state[block] is not BlockState.HELD:
                raise IllegalStep(f"block {block} of {owner} is {self._state[block]}: its content is not complete")
            if not self._key[block] and key not in self._block_of:
                self._key[block] = key
                self._block_of[key] = block

    def give_back(self, blocks: Sequence[int], owner: str) -> None:
        """``owner`` unpins its blocks. The end of a prefix comes free before its beginning, which is worth more."""
        for block in reversed(blocks):
            self._check_owner(block, owner)
            self._holders[block] = others = tuple(one for one in self._holders[block] if one != owner)
            if others:
                continue
            if self._key[block]:
                self._move(block, BlockState.CACHED)
                self._cached[block] = None
            else:
                self._free_block(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Let nobody else start from these blocks: what they hold has come into doubt."""
        for block in blocks:
            if self._key[block]:
                self._forget(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._key[block]]
        self._key[block] = ""
        if self._state[block] is BlockState.CACHED:
            del self._cached[block]
            self._free_block(block)

    def _free_block(self, block: int) -> None:
        self._move(block, BlockState.FREE)
        self._digest[block] = ""
        self._free.append(block)

    def digests(self, blocks: Sequence[int]) -> tuple[str, ...]:
        """The digest of each block, "" where it is not known."""
        return tuple(self._digest[block] for block in blocks)

    def digested(self, blocks: Sequence[int], owner: str, digests: Sequence[str]) -> None:
        """``owner``'s blocks were found to have these digests while it had pinned them."""
        for block, digest in zip(blocks, digests, strict=True):
            self._check_owner(block, owner)
            self._digest[block] = digest

    def intact(self, blocks: Sequence[int], found: Sequence[str]) -> int:
        """So many of the first ``blocks`` have the digest that was ``found`` of their bytes now. One that was never
        digested counts as changed."""
        for number, (block, digest) in enumerate(zip(blocks, found, strict=True)):
            if not digest or digest != self._digest[block]:
                return number
        return len(blocks)

    def owner_of(self, block: int) -> tuple[str, BlockState]:
        """The first holder ("" for none) and state of one block."""
        return next(iter(self._holders[block]), ""), self._state[block]

    def holders_of(self, block: int) -> tuple[str, ...]:
        """Everybody who has pinned a block."""
        return self._holders[block]

    def audit(self, holdings: Mapping[str, Sequence[int]]) -> None:
        """Check the pool against what its owners believe they hold: pinned + cached + free == total; a block that can
        be written has one holder; every key leads to a block that holds its content."""
        holders: dict[int, list[str]] = {}
        for owner, blocks in holdings.items():
            if len(blocks) != len(set(blocks)):
                raise IllegalStep(f"{owner} holds a block twice")
            for block in blocks:
                holders.setdefault(block, []).append(owner)
        for block, state in enumerate(self._state):
            believed = sorted(holders.get(block, ()))
            if believed != sorted(self._holders[block]):
                raise IllegalStep(f"block {block} is pinned by {self._holders[block]}, not by {believed}")
            if state is BlockState.RUNNING and len(believed) > 1:
                raise IllegalStep(f"block {block} is held twice and may be written")
            if bool(believed) is (state in (BlockState.FREE, BlockState.CACHED)):
                raise IllegalStep(f"block {block} is {state} and pinned by {believed}")
        loose = [*self._free, *self._cached]
        if len(holders) + len(loose) != self.num_blocks or len(set(loose)) != len(loose):
            raise IllegalStep(
                f"{len(holders)} pinned + {len(self._cached)} cached + {len(self._free)} free != {self.num_blocks}"
            )
        self._audit_keys()

    def _audit_keys(self) -> None:
        known = {key: block for block, key in enumerate(self._key) if key}
        if known != self._block_of:
            raise IllegalStep("a key leads to another block than the one that has it")
        if {self._state[block] for block in known.values()} - {BlockState.HELD, BlockState.CACHED}:
            raise IllegalStep("a block that is free or written has a key")
        cached = {block for block, state in enumerate(self._state) if state is BlockState.CACHED}
        if cached != set(self._cached) or cached - set(known.values()):
            raise IllegalStep("a cached block has no key, or is not in line")

    def _hold(self, block: int, owner: str) -> None:
        self._holders[block] += (owner,)

    def _check_owner(self, block: int, owner: str) -> None:
        if owner not in self._holders[block]:
            raise IllegalStep(f"block {block} belongs to {', '.join(self._holders[block]) or 'nobody'}, not to {owner}")
