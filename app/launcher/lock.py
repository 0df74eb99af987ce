"""One ``baton up`` per BATON_HOME: a lock that the kernel takes back with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import StartupError


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` for the length of the block; it is removed at the end.

    Children do not inherit it (close-on-exec), so it cannot outlive this process.

    Raises:
        StartupError: another process holds it; the message says which.
    """
    fd = _take(path)
    try:
        os.truncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _take(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise StartupError(
                f"Baton runs already: another `baton up` (pid {holder}) uses {path.parent.parent}: stop it,"
                " or choose another BATON_HOME, --port and --flower-port"
            ) from None
        if _is_still(path, fd):
            return fd
        os.close(fd)  # its last holder removed the file between our open and our lock


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
