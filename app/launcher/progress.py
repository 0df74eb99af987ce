"""How ``baton restart`` follows what ``baton up`` does: a file in its run folder, a line per step, then the outcome."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.errors import BatonError
from app.settings import Settings

_DONE, _FAILED = "= done", "= failed"
_LOOK_EVERY_S = 0.25

Say = Callable[[str], None]


class RestartFailed(BatonError):
    """The rolling restart did not come to its end."""


@contextmanager
def told(run: Path, say: Say) -> Iterator[Say]:
    """For the launcher: what is said in the block goes to ``say`` and to whoever follows; so does how it ends."""
    path = run / "restart"
    with path.open("a", buffering=1) as file:

        def write(line: str) -> None:
            with suppress(OSError):  # a full disk: whoever follows sees less, the cluster goes on
                print(line, file=file)

        def tell(line: str) -> None:
            say(line)
            write(line)

        try:
            yield tell
        except BaseException as error:
            write(f"{_FAILED}: {error or 'stopped'}")
            raise
        else:
            write(_DONE)
        finally:
            path.unlink(missing_ok=True)


def restart(settings: Settings, say: Say) -> None:
    """For a person: ask the launcher of this BATON_HOME for a rolling restart, and say how it goes until its end.

    Raises:
        RestartFailed: no launcher runs, one is restarting already, or it failed.
    """
    run = settings.home / "run"
    launcher = _launcher(run / "lock")
    if launcher is None:
        raise RestartFailed(f"no `baton up` runs with {settings.home}: name its BATON_HOME")
    try:
        fd = os.open(run / "restart", os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o600)
    except FileExistsError:
        raise RestartFailed("a restart is under way already") from None
    with os.fdopen(fd) as file:
        try:
            os.kill(launcher, signal.SIGUSR1)
        except OSError as error:
            (run / "restart").unlink(missing_ok=True)
            raise RestartFailed(f"`baton up` (process {launcher}) cannot be told: {error}") from error
        pause = threading.Event()
        outcome = ""
        while not outcome:
            line = file.readline()
            if line.startswith("= "):
                outcome = line.strip()
            elif line:
                say(line.rstrip())
            elif _launcher(run / "lock") != launcher:
                raise RestartFailed("`baton up` has ended")
            else:
                pause.wait(_LOOK_EVERY_S)
    if outcome != _DONE:
        raise RestartFailed(outcome.removeprefix("= "))


def _launcher(lock: Path) -> int | None:
    """Process id of whoever holds the lock of ``baton up``."""
    try:
        fd = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(fd, 32) or 0) or None  # it has not said yet
    else:
        return None  # its holder was killed
    finally:
        os.close(fd)
