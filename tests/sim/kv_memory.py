"""The KV blocks of a node, as any process of its host can read them."""

from __future__ import annotations

from array import array

import xxhash

from tests.sim.model import BLOCK_TOKENS, NOTHING_YET


class KVMemory:
    """Contents and generations of the blocks. Stays readable for whoever has it mapped, even when its owner is gone."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [[NOTHING_YET] * BLOCK_TOKENS for _ in range(num_blocks)]
        self.generations = [0] * num_blocks
        self.salts = [""] * num_blocks
        """Of the request that wrote to each block."""
        self._last_use = [("", 0)] * num_blocks

    def bump(self, block: int) -> int:
        self.generations[block] += 1
        return self.generations[block]

    def digest(self, block: int) -> str:
        return xxhash.xxh3_128_hexdigest(array("Q", self.blocks[block]).tobytes())

    def is_new_use(self, block: int, key: str) -> bool:
        """Note that ``key`` writes; False if another one wrote at the same generation: no reader could tell."""
        last_key, generation = self._last_use[block]
        if last_key == key:
            return True
        self._last_use[block] = (key, self.generations[block])
        return not last_key or self.generations[block] != generation
