"""The end of a process whose thread died or will never move again: loud, at once, for its supervisor to see."""

from __future__ import annotations

import logging
import os

CRASHED = 70
"""Exit code of a process that cannot go on (EX_SOFTWARE): its supervisor starts it again."""
REFUSED = 78
"""Exit code of a worker that the cluster will not have (EX_CONFIG)."""

logger = logging.getLogger("baton.node")


def end_crashed(nodename: str, lane: str, error: BaseException) -> None:
    """A dead or stuck lane would hang requests in silence. The process ends; ledger and supervisor do the rest."""
    logger.critical("lane %s died node=%s: exiting", lane, nodename, exc_info=error)
    logging.shutdown()
    os._exit(CRASHED)


def end_refused(nodename: str, detail: str) -> None:
    """The cluster has refused this node for longer than an earlier life of the cluster could be the reason."""
    logger.critical("baton: %s cannot join: %s", nodename, detail)
    logging.shutdown()
    os._exit(REFUSED)
