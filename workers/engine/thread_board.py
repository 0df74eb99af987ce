"""Where the workers of a machine see who computes, so that one may use the processors that others leave idle."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import time
from pathlib import Path

from app.processors import available_processors

SLOTS = 64
"""Workers of one machine that can borrow from each other; those beyond compute on their own threads alone."""
_LOOK_EVERY_S = 1.0


class Member(ctypes.Structure):
    """See ``Member`` in ``kernels/csrc/team.h``."""

    _fields_ = (("threads", ctypes.c_uint32), ("busy", ctypes.c_uint32))


class ThreadBoard:
    """A file that all workers of a machine map, with a slot for each: how many threads it has, and whether it computes.

    A slot belongs to who holds the lock on its place in the file. The kernel drops that with its holder, however it
    ends, and what a dead worker left in its slot is wiped by the others within a second of their next step.
    """

    def __init__(self, file: Path, own: int) -> None:
        """Take a slot for a worker that computes on ``own`` threads.

        Raises:
            OSError: the file cannot be had, or all slots are taken.
        """
        self.processors = available_processors()
        size = SLOTS * ctypes.sizeof(Member)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(self._fd, max(size, os.fstat(self._fd).st_size))
            self.members = (Member * SLOTS).from_buffer(mmap.mmap(self._fd, size))
            self.slot = self._take_slot()
        except BaseException:
            os.close(self._fd)
            raise
        self._own = self.members[self.slot]
        self._own.busy = 0
        self._own.threads = own
        self._look_at = 0.0

    def computing(self) -> None:
        """This worker has something to compute, and wants its own threads' time."""
        self._own.busy = 1
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._wipe_dead()

    def idle(self) -> None:
        """It has nothing to compute."""
        self._own.busy = 0

    def close(self) -> None:
        """Give the slot back; nothing may compute any more."""
        if self._fd >= 0:
            self.idle()
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock_of(self.slot, fcntl.F_UNLCK))  # the mapping would keep it
            os.close(self._fd)
            self._fd = -1

    def _take_slot(self) -> int:
        for slot in range(SLOTS):
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock_of(slot))
            except (BlockingIOError, PermissionError):
                continue
            return slot
        raise OSError(f"all {SLOTS} slots are taken")

    def _wipe_dead(self) -> None:
        for slot, member in enumerate(self.members):
            if member.busy and slot != self.slot:
                answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _lock_of(slot))
                if struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK:
                    member.busy = 0


_FLOCK = "hhqqi0q"
"""struct flock on 64-bit Linux: type, whence, start, length, process."""


def _lock_of(slot: int, kind: int = fcntl.F_WRLCK) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, slot, 1, 0)
