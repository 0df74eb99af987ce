"""Memory for weights in huge pages: one token reads all of them, and with small pages half of the time is spent on
finding the pages. Where the system has no huge pages it is ordinary memory."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import paddle

_CHUNK_BYTES = 64 * 2**20
"""Of which only what is used becomes memory of the process."""
_ALIGN_BYTES = 64


class Arena:
    """Hands out memory that is never returned before the tensors in it are gone."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def copy(self, array: np.ndarray[Any, Any]) -> paddle.Tensor:
        """A tensor with the content of ``array``."""
        nbytes = array.nbytes
        if self._used + nbytes > self._chunk.size:
            self._chunk, self._used = _huge(max(nbytes, _CHUNK_BYTES)), 0
        place = self._chunk[self._used : self._used + nbytes].view(array.dtype).reshape(array.shape)
        self._used += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        place[...] = array
        return paddle.utils.dlpack.from_dlpack(place)


def _huge(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
