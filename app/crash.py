"""The end of a process whose thread died or will never move again: loud, at once, for its supervisor to see."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from functools import cache

CRASHED = 70
"""Exit code of a process that cannot go on (EX_SOFTWARE): its supervisor starts it again."""
REFUSED = 78
"""Exit code of a worker that the cluster will not have (EX_CONFIG)."""

_LAST_LINES_S = 1.0

logger = logging.getLogger("baton.node")


def end_in(seconds: float) -> None:
    """End the process in so many seconds, unless this is called again or ``do_not_end`` is.

    Nothing that its threads do can prevent it, not even one that never gives the interpreter's lock back: a thread
    that knows no Python waits for it. Prints where each thread stands; the exit status is 1.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_stderr())


def do_not_end() -> None:
    """Take ``end_in`` back."""
    faulthandler.cancel_dump_traceback_later()


def end_crashed(nodename: str, lane: str, error: BaseException) -> None:
    """A dead or stuck lane would hang requests in silence. The process ends; ledger and supervisor do the rest.

    Of one that is stuck, only where its thread stands says why.
    """
    logger.critical("lane %s died node=%s: exiting", lane, nodename, exc_info=error)
    if isinstance(error, TimeoutError):
        faulthandler.dump_traceback(file=_stderr())
    flush_logs()
    os._exit(CRASHED)


def end_refused(nodename: str, detail: str) -> None:
    """The cluster has refused this node for longer than an earlier life of the cluster could be the reason."""
    logger.critical("baton: %s cannot join: %s", nodename, detail)
    flush_logs()
    os._exit(REFUSED)


def flush_logs() -> None:
    """Nobody may take them: then the process ends without."""
    flush = threading.Thread(target=logging.shutdown, daemon=True)
    flush.start()
    flush.join(_LAST_LINES_S)


@cache
def _stderr() -> int:
    """Standard error (``sys.stderr`` may be something of Celery's) for writes that do not wait for its reader."""
    try:
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # a socket, or no /proc here
        return 2
