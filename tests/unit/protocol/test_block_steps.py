"""A block goes along its role's table only: no way leads from under a writer into somebody else's hands."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from app.protocol.blocks import BlockPool
from app.protocol.tables import DECODE_BLOCK_STEPS, PREFILL_BLOCK_STEPS, BlockState, IllegalStep

Steps = Mapping[BlockState, frozenset[BlockState]]
# Written down once more: the tables themselves must not be what tells right from wrong here.
PATHS = {
    "decode": (BlockState.RESERVED, BlockState.PULLING, BlockState.READY, BlockState.IN_STEP),
    "prefill": (BlockState.RUNNING, BlockState.HELD),
}
NEXT = {
    BlockState.RESERVED: {BlockState.PULLING},
    BlockState.PULLING: {BlockState.READY},
    BlockState.READY: {BlockState.IN_STEP},
    BlockState.IN_STEP: {BlockState.READY},
    BlockState.RUNNING: {BlockState.HELD},
    BlockState.HELD: {BlockState.CACHED},
}


@pytest.mark.parametrize("there", [BlockState.RESERVED, BlockState.PULLING, BlockState.READY, BlockState.IN_STEP])
@pytest.mark.parametrize("to", BlockState)
def test_a_decode_block_does_not_leave_its_table(there: BlockState, to: BlockState) -> None:
    check("decode", DECODE_BLOCK_STEPS, there, to)


@pytest.mark.parametrize("there", [BlockState.RUNNING, BlockState.HELD])
@pytest.mark.parametrize("to", BlockState)
def test_a_prefill_block_does_not_leave_its_table(there: BlockState, to: BlockState) -> None:
    check("prefill", PREFILL_BLOCK_STEPS, there, to)


def check(role: str, steps: Steps, there: BlockState, to: BlockState) -> None:
    pool = BlockPool(2, steps)
    first, *rest = PATHS[role][: PATHS[role].index(there) + 1]
    blocks = pool.take(1, "a", first)
    for state in rest:
        pool.move(blocks, "a", state)
    if to in NEXT[there] | {BlockState.FREE}:
        pool.move(blocks, "a", to)
        assert pool.owner_of(blocks[0])[1] is to
    else:
        with pytest.raises(IllegalStep):
            pool.move(blocks, "a", to)
        assert pool.owner_of(blocks[0]) == ("a", there)
