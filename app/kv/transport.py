"""The seam between a decode node and the KV blocks of a prefill node."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from app.schemas import KVLocation

if TYPE_CHECKING:
    from app.kv.pool import KVPool


class PullFailure(StrEnum):
    """Why a pull failed: the ``reason`` of a ``PullError``."""

    GONE = "gone"
    """The process or its pool is not there any more."""
    FOREIGN = "foreign"
    """What lies at the location is not the pool it names: another file, incarnation or size."""
    UNREADABLE = "unreadable"
    """This process cannot open or map the pool now: no file descriptor or address space is left."""
    SHORT = "short"
    """The pool is smaller than its header says, or does not reach to a block that was asked for."""
    COUNTS = "counts"
    """Blocks, generations, digests and destinations are not equally many, or there are none."""
    GENERATION = "generation"
    """A block was given to its next use before or during the copy."""
    DIGEST = "digest"
    """The copied bytes are not those that were committed."""
    LAYOUT = "layout"
    """The two pools hold KV of another model, dtype or shape."""


class KVTransport(Protocol):
    """Copies blocks of another node's pool into one's own. Safe to call from several threads."""

    def pull(
        self,
        location: KVLocation,
        src_blocks: Sequence[int],
        generations: Sequence[int],
        digests: Sequence[bytes],
        into: KVPool,
        dst_blocks: Sequence[int],
    ) -> None:
        """Copy ``src_blocks`` to ``dst_blocks``, then compare every generation, then every digest.

        Returns only when all of it holds. After a failure the destination blocks hold rubbish, but nothing
        writes to them any more.

        Raises:
            PullError: with a ``PullFailure`` as its ``reason``.
            ValueError: ``dst_blocks`` are not distinct blocks of ``into``.
        """
        ...

    def forget_gone(self) -> None:
        """Let go of whatever is kept of nodes that are gone: it may be all that keeps their memory. Cheap."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
