"""The user's cache: what is made once, by one process while others wait, and is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class StillHeld(Exception):
    """Another process has held the lock for too long. The message names the file."""


def lock_for(target: Path, timeout_s: float, waiting: Callable[[], None]) -> FileLock:
    """Return the lock of ``target``, held. The kernel drops it with its holder, kill -9 included.

    ``waiting`` is called once if another process has it.

    Raises:
        StillHeld: and still has it after ``timeout_s``.
        OSError: its file cannot be written.
    """
    file = target.parent / f".{target.name}.lock"
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            raise StillHeld(f"{file}: still held by another process after {timeout_s:g} s") from None
    return lock


@contextmanager
def making(target: Path) -> Iterator[tuple[Path, Path]]:
    """For a block that makes the folder ``target``, under its lock: a folder to work in, and the one to fill.

    At the end of the block that one is given the name, synced: a power cut does not leave the name without the
    content. If the block raises nothing is left; what a killed process left is removed first.
    """
    prefix = f".{target.name}.tmp-"
    for litter in target.parent.glob(prefix + "*"):
        shutil.rmtree(litter)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work:
        result = Path(work) / "result"
        result.mkdir()
        yield Path(work), result
        for written in (*result.iterdir(), result):
            _sync(written)
        result.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
