"""A KV pool in shared memory: written by its owner alone, readable by every process of the same user.

It is a memfd: other processes open it through ``/proc/PID/fd/N``, and the kernel takes it back when the last
of them is gone, kill -9 included. The file is::

    header page | generations, uint64 per block | blocks, block-major

with each part starting on a page.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from app.errors import StartupError
from app.kv.memory import available_bytes
from app.schemas import KVLocation

PAGE_BYTES = 4096
MAGIC = b"BATONKV1"
MEMFD_NAME = "baton-kv"
_HEADER = struct.Struct("<8sQQHH")  # magic, num_blocks, block_bytes, length of incarnation, length of layout
_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>; not in Python 3.11's fcntl


@dataclass(frozen=True)
class Header:
    """The first page of a pool."""

    incarnation: str
    layout: str
    num_blocks: int
    block_bytes: int

    def pack(self) -> bytes:
        incarnation, layout = self.incarnation.encode(), self.layout.encode()
        fixed = _HEADER.pack(MAGIC, self.num_blocks, self.block_bytes, len(incarnation), len(layout))
        packed = fixed + incarnation + layout
        if len(packed) > PAGE_BYTES:
            raise StartupError(f"KV pool: incarnation and layout take {len(packed)} bytes, the header has {PAGE_BYTES}")
        return packed.ljust(PAGE_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Header:
        """Read a header page.

        Raises:
            ValueError: these bytes are no header.
        """
        if len(page) < PAGE_BYTES:
            raise ValueError(f"{len(page)} bytes are no header page")
        magic, num_blocks, block_bytes, incarnation_length, layout_length = _HEADER.unpack_from(page)
        end = _HEADER.size + incarnation_length + layout_length
        if magic != MAGIC or end > PAGE_BYTES:
            raise ValueError("no KV pool header")
        middle = _HEADER.size + incarnation_length
        return cls(
            incarnation=page[_HEADER.size : middle].decode(errors="replace"),
            layout=page[middle:end].decode(errors="replace"),
            num_blocks=num_blocks,
            block_bytes=block_bytes,
        )

    @property
    def data_offset(self) -> int:
        """Where block 0 starts, in bytes."""
        generation_pages = -(-self.num_blocks * 8 // PAGE_BYTES)
        return PAGE_BYTES * (1 + generation_pages)

    @property
    def total_bytes(self) -> int:
        return self.data_offset + self.num_blocks * self.block_bytes

    def views(self, memory: mmap.mmap) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        """``(generations [num_blocks], blocks [num_blocks, block_bytes])`` over mapped memory, without a copy."""
        generations = np.frombuffer(memory, np.uint64, self.num_blocks, PAGE_BYTES)
        flat = np.frombuffer(memory, np.uint8, self.num_blocks * self.block_bytes, self.data_offset)
        return generations, flat.reshape(self.num_blocks, self.block_bytes)


def digest_blocks(blocks: npt.NDArray[np.uint8], indexes: Sequence[int]) -> list[bytes]:
    """xxh3-128 of each block: 16 bytes, about 0.1 ms per MiB."""
    return [xxhash.xxh3_128_digest(blocks[index]) for index in indexes]


class KVPool:
    """The owner's side of a pool.

    Attributes:
        blocks: uint8 [num_blocks, block_bytes], writable.
        generations: uint64 [num_blocks].
    """

    def __init__(self, fd: int, header: Header, memory: mmap.mmap) -> None:
        self._fd = fd
        self._header = header
        self.generations, self.blocks = header.views(memory)

    @classmethod
    def create(cls, num_blocks: int, block_bytes: int, incarnation: str, layout: str) -> KVPool:
        """Make a pool with all its pages in memory: a first touch later would run at a tenth of the speed.

        Raises:
            StartupError: the sizes make no sense, or the machine lacks the memory.
        """
        if num_blocks < 1 or block_bytes < 1:
            raise StartupError(f"KV pool: num_blocks={num_blocks} and block_bytes={block_bytes} must be at least 1")
        if not incarnation or not layout:
            raise StartupError("KV pool: incarnation and layout must not be empty")
        header = Header(incarnation=incarnation, layout=layout, num_blocks=num_blocks, block_bytes=block_bytes)
        packed = header.pack()
        available = available_bytes()
        if header.total_bytes > available:
            raise StartupError(
                f"KV pool: {num_blocks} blocks take {header.total_bytes / 2**20:.0f} MiB, "
                f"{available / 2**20:.0f} MiB are available; use fewer blocks"
            )
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, header.total_bytes)
            memory = mmap.mmap(fd, header.total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(fd)
            raise StartupError(f"KV pool: {num_blocks} blocks cannot be allocated: {error}") from error
        memory[:PAGE_BYTES] = packed
        _seal(fd)
        return cls(fd, header, memory)

    @property
    def num_blocks(self) -> int:
        return self._header.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._header.block_bytes

    @property
    def layout(self) -> str:
        return self._header.layout

    def bump(self, block: int) -> int:
        """Start a block's next use: call it before the first write, so that a reader of the last use notices.

        Returns the new generation.
        """
        self.generations[block] += np.uint64(1)
        return int(self.generations[block])

    def digest(self, blocks: Sequence[int]) -> list[bytes]:
        """xxh3-128 of each of these blocks as they are now."""
        return digest_blocks(self.blocks, blocks)

    def location(self) -> KVLocation:
        """Where another process of this host finds this pool."""
        if self._fd < 0:
            raise ValueError("this KV pool is closed")
        return KVLocation(
            pid=os.getpid(),
            fd=self._fd,
            incarnation=self._header.incarnation,
            num_blocks=self._header.num_blocks,
            block_bytes=self._header.block_bytes,
            layout=self._header.layout,
        )

    def close(self) -> None:
        """Nobody can open it from now on. The memory goes when the last array over it does. Twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.blocks = np.empty((0, self._header.block_bytes), np.uint8)
        self.generations = np.empty(0, np.uint64)


def _seal(fd: int) -> None:
    """Fix the size, so that a reader never dies of SIGBUS; and let nobody else map it for writing (rule 5)."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 5.1 does not know this seal; the rest holds without it
            raise
