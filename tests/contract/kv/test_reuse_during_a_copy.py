"""Rule 6: a block that went to its next use while it was copied is refused, even if the copy looks right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.errors import PullError
from app.kv import KVPool, KVReader, PullFailure

LAYOUT = "layout"


class Copied:
    """The blocks of a pool; ``then`` runs after each copy into one of them."""

    def __init__(self, blocks: Any, then: Callable[[], object]) -> None:
        self._blocks = blocks
        self._then = then

    def __setitem__(self, block: int, content: Any) -> None:
        self._blocks[block] = content
        self._then()

    def __getitem__(self, block: int) -> Any:
        return self._blocks[block]


def test_the_generation_counts_as_it_is_after_the_copy() -> None:
    source = KVPool.create(4, 4096, "owner", LAYOUT)
    target = KVPool.create(4, 4096, "reader", LAYOUT)
    reader = KVReader()
    try:
        generations = [source.bump(1)]
        target.blocks = Copied(target.blocks, lambda: source.bump(1))  # type: ignore[assignment]
        with pytest.raises(PullError) as failure:
            reader.pull(source.location(), [1], generations, source.digest([1]), target, [2])
        assert failure.value.reason == PullFailure.GENERATION
    finally:
        reader.close()
        source.close()
        target.close()
