"""Pulls KV blocks out of another process's pool on this host."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from app.errors import PullError
from app.kv.pool import MEMFD_NAME, PAGE_BYTES, Header, KVPool
from app.kv.transport import PullFailure
from app.schemas import KVLocation

__all__ = ["KVReader", "PullFailure"]


_RESIDENT_BYTES = 64 * 2**20
"""What is read of a pool before its pages are let go: the prompts of a while, so that few are found twice."""


class _Mapping:
    """Another node's pool, mapped read-only. Unmapped when the last reference goes."""

    def __init__(self, header: Header, memory: mmap.mmap, path: Path, identity: tuple[int, int]) -> None:
        self.path = path
        self._identity = identity
        self._memory = memory
        self._read_bytes = 0
        self.generations, self.blocks = header.views(memory)

    def count_read(self, num_blocks: int) -> None:
        """Count blocks that were copied, and let go of all pages once they are many.

        They are the owner's, but count as this process's memory too, for whoever watches or limits that. A copy that
        runs beside this finds them again.
        """
        self._read_bytes += num_blocks * self.blocks.shape[1]
        if self._read_bytes > _RESIDENT_BYTES:
            self._read_bytes = 0
            self._memory.madvise(mmap.MADV_DONTNEED)

    def check_there(self) -> bool:
        """Whether its owner still has this pool. Raises OSError when nothing can be seen there."""
        status = self.path.stat()
        return self._identity == (status.st_dev, status.st_ino)


class KVReader:
    """The shared-memory ``KVTransport``.

    Mappings are kept per incarnation, ``max_mappings`` at most (the longest unused goes first). Before each
    pull the file behind ``/proc/PID/fd/N`` is compared with the mapped one: a dead node is GONE, and its memory
    is let go, even though the mapping would still read.
    """

    def __init__(self, max_mappings: int = 16) -> None:
        if max_mappings < 1:
            raise ValueError(f"max_mappings={max_mappings} must be at least 1")
        self._max_mappings = max_mappings
        self._mappings: OrderedDict[str, _Mapping] = OrderedDict()
        self._lock = threading.Lock()

    def pull(
        self,
        location: KVLocation,
        src_blocks: Sequence[int],
        generations: Sequence[int],
        digests: Sequence[bytes],
        into: KVPool,
        dst_blocks: Sequence[int],
    ) -> None:
        """See ``KVTransport.pull``."""
        _check_request(location, src_blocks, generations, digests, into, dst_blocks)
        source = self._mapping(location)
        for src, dst in zip(src_blocks, dst_blocks, strict=True):
            into.blocks[dst] = source.blocks[src]
        source.count_read(len(src_blocks))
        for src, generation in zip(src_blocks, generations, strict=True):
            found = int(source.generations[src])
            if found != generation:
                raise PullError(
                    f"block {src} of {location.incarnation} is at generation {found}, not {generation}",
                    reason=PullFailure.GENERATION,
                )
        for src, expected, copied in zip(src_blocks, digests, into.digest(dst_blocks), strict=True):
            if copied != expected:
                raise PullError(
                    f"block {src} of {location.incarnation}: digest {copied.hex()}, not {expected.hex()}",
                    reason=PullFailure.DIGEST,
                )

    def forget_gone(self) -> None:
        """See ``KVTransport.forget_gone``: a look into /proc per mapping. A pull that runs keeps its own reference."""
        with self._lock:
            kept = list(self._mappings.items())
        gone = [(incarnation, mapping) for incarnation, mapping in kept if not _is_there(mapping)]
        with self._lock:
            for incarnation, mapping in gone:
                if self._mappings.get(incarnation) is mapping:
                    del self._mappings[incarnation]

    def close(self) -> None:
        """See ``KVTransport.close``."""
        with self._lock:
            self._mappings.clear()

    @property
    def mapped(self) -> tuple[str, ...]:
        """Incarnations whose pools are mapped now, the longest unused first."""
        with self._lock:
            return tuple(self._mappings)

    def _mapping(self, location: KVLocation) -> _Mapping:
        path = Path(f"/proc/{location.pid}/fd/{location.fd}")
        with self._lock:
            cached = self._mappings.get(location.incarnation)
            try:
                if cached is None or cached.path != path or not cached.check_there():
                    self._mappings.pop(location.incarnation, None)
                    cached = _open(path, location)
            except (FileNotFoundError, ProcessLookupError) as error:
                self._mappings.pop(location.incarnation, None)
                raise PullError(f"the pool of {location.incarnation} is gone", reason=PullFailure.GONE) from error
            except PermissionError as error:
                raise PullError(
                    f"the pool of {location.incarnation} (pid {location.pid}) belongs to another user",
                    reason=PullFailure.FOREIGN,
                ) from error
            except OSError as error:  # EMFILE, ENOMEM: this pull fails, the process goes on
                raise PullError(
                    f"the pool of {location.incarnation} cannot be mapped: {error}", reason=PullFailure.UNREADABLE
                ) from error
            self._mappings[location.incarnation] = cached
            self._mappings.move_to_end(location.incarnation)
            while len(self._mappings) > self._max_mappings:
                self._mappings.popitem(last=False)
            return cached


def _check_request(
    location: KVLocation,
    src_blocks: Sequence[int],
    generations: Sequence[int],
    digests: Sequence[bytes],
    into: KVPool,
    dst_blocks: Sequence[int],
) -> None:
    counts = (len(src_blocks), len(generations), len(digests), len(dst_blocks))
    if min(counts) != max(counts) or counts[0] == 0:
        raise PullError(
            "blocks, generations, digests and destinations must be equally many and at least one, "
            f"got {', '.join(map(str, counts))}",
            reason=PullFailure.COUNTS,
        )
    if location.layout != into.layout or location.block_bytes != into.block_bytes:
        raise PullError(
            f"layout {location.layout!r} with {location.block_bytes} bytes per block does not fit "
            f"{into.layout!r} with {into.block_bytes}",
            reason=PullFailure.LAYOUT,
        )
    for src in src_blocks:
        if not 0 <= src < location.num_blocks:
            raise PullError(
                f"block {src} lies outside the {location.num_blocks} blocks of {location.incarnation}",
                reason=PullFailure.SHORT,
            )
    if len(set(dst_blocks)) != len(dst_blocks) or not all(0 <= dst < into.num_blocks for dst in dst_blocks):
        raise ValueError(f"dst_blocks must be distinct and lie in 0..{into.num_blocks - 1}: {list(dst_blocks)}")


def _open(path: Path, location: KVLocation) -> _Mapping:
    """Map the pool at ``path`` if it is the one that ``location`` names.

    The name is looked at first: to open a FIFO or a device of a process that took over the pid has effects.
    """
    if not str(path.readlink()).startswith(f"/memfd:{MEMFD_NAME}"):
        raise _foreign(location, "it is no KV pool")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        header = _read_header(fd, location)
        if status.st_size < header.total_bytes:
            raise PullError(
                f"the pool of {location.incarnation} has {status.st_size} bytes, its header says {header.total_bytes}",
                reason=PullFailure.SHORT,
            )
        # Unsealed, its owner could shrink it during the copy, and reading past the end kills the reader.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise _foreign(location, "its size is not sealed")
        memory = mmap.mmap(fd, header.total_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return _Mapping(header, memory, path, (status.st_dev, status.st_ino))
    finally:
        os.close(fd)


def _read_header(fd: int, location: KVLocation) -> Header:
    try:
        header = Header.unpack(os.pread(fd, PAGE_BYTES, 0))
    except ValueError as error:
        raise _foreign(location, str(error)) from error
    if header.incarnation != location.incarnation:
        raise _foreign(location, f"it belongs to {header.incarnation}")
    if header.layout != location.layout:
        raise PullError(
            f"the pool of {location.incarnation} has layout {header.layout!r}, not {location.layout!r}",
            reason=PullFailure.LAYOUT,
        )
    if (header.num_blocks, header.block_bytes) != (location.num_blocks, location.block_bytes):
        raise _foreign(location, f"it has {header.num_blocks} blocks of {header.block_bytes} bytes")
    return header


def _foreign(location: KVLocation, why: str) -> PullError:
    return PullError(
        f"what lies at the pool of {location.incarnation} is not that pool: {why}", reason=PullFailure.FOREIGN
    )


def _is_there(mapping: _Mapping) -> bool:
    try:
        return mapping.check_there()
    except OSError:  # gone, or another user's process has its pid: a new mapping would be refused there too
        return False
