"""The block pool of a node: who holds which KV block, in which state. Pure bookkeeping; the bytes lie elsewhere."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from app.protocol.tables import BlockState, IllegalStep


def blocks_for(num_tokens: int, block_size_tokens: int) -> int:
    """Blocks that hold the KV of ``num_tokens`` positions."""
    return -(-num_tokens // block_size_tokens)


class BlockPool:
    """Hands out blocks, oldest-freed first, and knows owner and state of each.

    ``steps`` is the block table of the node's role. ``on_take`` is called for each block *before* its next owner may
    write it: it bumps the block's generation (rule 6), so that a reader that still copies it will notice, and
    returns the new one.

    Raises IllegalStep for a step that the table does not have, for a block that is not the caller's, and from
    ``audit`` when the sums are wrong: all of them bugs, none of them a peer's doing.
    """

    def __init__(
        self,
        num_blocks: int,
        steps: Mapping[BlockState, frozenset[BlockState]],
        on_take: Callable[[int], int] = lambda block: 0,
    ) -> None:
        self.num_blocks = num_blocks
        self._steps = steps
        self._on_take = on_take
        self._free = deque(range(num_blocks))
        self._state = [BlockState.FREE] * num_blocks
        self._owner = [""] * num_blocks
        self._generation = [0] * num_blocks
        self._counts: Counter[BlockState] = Counter({BlockState.FREE: num_blocks})

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    def take(self, count: int, owner: str, state: BlockState) -> tuple[int, ...]:
        """Take ``count`` free blocks for ``owner``. The caller has checked ``free``."""
        if count > len(self._free):
            raise IllegalStep(f"{owner} wants {count} blocks, {len(self._free)} are free")
        blocks = tuple(self._free.popleft() for _ in range(count))
        for block in blocks:
            self._generation[block] = self._on_take(block)
            self._move(block, state)
            self._hold(block, owner)
        return blocks

    def move(self, blocks: Sequence[int], owner: str, state: BlockState) -> None:
        """Bring ``owner``'s blocks into another state."""
        for block in blocks:
            self._check_owner(block, owner)
            self._move(block, state)

    def give_back(self, blocks: Sequence[int], owner: str) -> None:
        """Free ``owner``'s blocks."""
        for block in blocks:
            self._check_owner(block, owner)
            self._move(block, BlockState.FREE)
            self._owner[block] = ""
            self._free.append(block)

    def generations(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The generation of each block, as it was taken."""
        return tuple(self._generation[block] for block in blocks)

    def counts(self) -> dict[str, int]:
        """Blocks by state, with ``total`` and ``free`` always there."""
        by_state = {state.lower(): count for state, count in self._counts.items() if count}
        return {"total": self.num_blocks, "free": 0, **by_state}

    def owner_of(self, block: int) -> tuple[str, BlockState]:
        """Owner ("" for none) and state of one block."""
        return self._owner[block], self._state[block]

    def audit(self, holdings: Mapping[str, Sequence[int]]) -> None:
        """Check the pool against what its owners believe they hold: free + held == total, no block twice."""
        held = [block for blocks in holdings.values() for block in blocks]
        if len(held) != len(set(held)):
            raise IllegalStep("a block is held twice")
        if len(held) + len(self._free) != self.num_blocks or len(set(self._free)) != len(self._free):
            raise IllegalStep(f"{len(held)} held + {len(self._free)} free != {self.num_blocks}")
        for owner, blocks in holdings.items():
            for block in blocks:
                self._check_owner(block, owner)

    def _move(self, block: int, state: BlockState) -> None:
        old = self._state[block]
        if state not in self._steps.get(old, frozenset()):
            raise IllegalStep(f"block {block}: {old} -> {state}")
        self._state[block] = state
        self._counts[old] -= 1
        self._counts[state] += 1

    def _hold(self, block: int, owner: str) -> None:
        self._owner[block] = owner

    def _check_owner(self, block: int, owner: str) -> None:
        if self._owner[block] != owner:
            raise IllegalStep(f"block {block} belongs to {self._owner[block] or 'nobody'}, not to {owner}")
