"""The end of a process whose thread died or will never move again: loud, at once, for its supervisor to see."""

from __future__ import annotations

import faulthandler
import logging
import os

CRASHED = 70
"""Exit code of a process that cannot go on (EX_SOFTWARE): its supervisor starts it again."""
REFUSED = 78
"""Exit code of a worker that the cluster will not have (EX_CONFIG)."""

_STDERR = 2
"""Celery puts something of its own in the place of ``sys.stderr``."""

logger = logging.getLogger("baton.node")


def end_in(seconds: float) -> None:
    """End the process in so many seconds, unless this is called again or ``do_not_end`` is.

    Nothing that its threads do can prevent it, not even one that never gives the interpreter's lock back: a thread
    that knows no Python waits for it. Prints where each thread stands; the exit status is 1.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def do_not_end() -> None:
    """Take ``end_in`` back."""
    faulthandler.cancel_dump_traceback_later()


def end_crashed(nodename: str, lane: str, error: BaseException) -> None:
    """A dead or stuck lane would hang requests in silence. The process ends; ledger and supervisor do the rest.

    Of one that is stuck, only where its thread stands says why.
    """
    logger.critical("lane %s died node=%s: exiting", lane, nodename, exc_info=error)
    if isinstance(error, TimeoutError):
        faulthandler.dump_traceback(file=_STDERR)
    logging.shutdown()
    os._exit(CRASHED)


def end_refused(nodename: str, detail: str) -> None:
    """The cluster has refused this node for longer than an earlier life of the cluster could be the reason."""
    logger.critical("baton: %s cannot join: %s", nodename, detail)
    logging.shutdown()
    os._exit(REFUSED)
