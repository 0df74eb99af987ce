"""What a prefill node hands over wrongly when a test says so."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from app.kv import KVPool
from app.kv.pool import MEMFD_NAME, PAGE_BYTES, Header
from app.schemas import KVLocation
from workers.failpoints.orders import Action


class WrongBytes:
    """Spoils sealed blocks, or the place they are said to be at. Keeps the pools it forges for the process's life."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._forged: dict[Action, int] = {}

    def spoil(self, action: Action, location: KVLocation, blocks: Sequence[int]) -> KVLocation:
        """Do ``action`` to ``blocks``, the last of them where one is enough; returns the place to name in COMMIT."""
        last = self._pool.blocks[blocks[-1]]
        if action is Action.CORRUPT:
            last[0] ^= 1
        elif action is Action.SWAPPED:
            last[:] = self._pool.blocks[blocks[0]] if len(blocks) > 1 else ~last
        elif action in (Action.SHORT, Action.FOREIGN):
            fd = self._forged.get(action)
            if fd is None:
                fd = self._forged[action] = self._forge(action, location)
            return location.model_copy(update={"fd": fd})
        return location

    def _forge(self, action: Action, location: KVLocation) -> int:
        """A pool as the real one, but for its owner or its length."""
        foreign = action is Action.FOREIGN
        header = Header(
            incarnation="f" * 32 if foreign else location.incarnation,
            layout=location.layout,
            num_blocks=location.num_blocks,
            block_bytes=location.block_bytes,
        )
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, header.total_bytes if foreign else PAGE_BYTES)
        os.pwrite(fd, header.pack(), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd
