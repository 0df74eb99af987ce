"""The ends of a worker that nobody wants: a part of it is dead or stuck, or the cluster refuses it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from app.crash import do_not_end, end_crashed, end_in, end_refused
from app.errors import LedgerError

LAST_WORDS_S = 2.0
"""What a node may still say, whatever it is that does not move: a ledger call takes no longer either."""

logger = logging.getLogger("baton.node")


class Emergency:
    """Ends the process of one node, with last words, within ``LAST_WORDS_S``.

    ``last_words(part, why)`` hands back what the node holds; it may wait for the ledger, and raise LedgerError.
    """

    def __init__(
        self,
        nodename: str,
        *,
        stall_s: float,
        refused_for_s: float,
        shut: Callable[[], None],
        last_words: Callable[[str, str], None],
    ) -> None:
        """``shut``: take no more work, from now on. ``refused_for_s``: how long a refusal may last."""
        self.unhealthy = False
        self._nodename = nodename
        self._stall_s = stall_s
        self._refused_for_s = refused_for_s
        self._shut = shut
        self._last_words = last_words
        self._refused_since = 0.0
        self._closed = False
        self._begun = threading.Lock()
        self._arming = threading.Lock()

    def watched(self) -> None:
        """The watchdog runs. It does not while one thread keeps the interpreter to itself: that ends the process."""
        with self._arming:
            if not self.unhealthy and not self._closed:
                end_in(self._stall_s + LAST_WORDS_S)

    def crashed(self, part: str, error: BaseException) -> None:
        """A part is dead or stuck: it would hang requests in silence while heartbeats go on. From now on the node is
        unhealthy and takes nothing; what it holds goes back, and the process ends, whether that works or not."""
        if self._closed or not self._begun.acquire(blocking=False):
            return
        try:
            with self._arming:
                self.unhealthy = True
                end_in(LAST_WORDS_S)
            self._shut()
            logger.critical("unhealthy node=%s part=%s: %s: %s", self._nodename, part, type(error).__name__, error)
            self._last_words(part, f"{self._nodename} is unhealthy: {part}: {error}")
        except LedgerError as error_of_ledger:
            logger.warning("nothing handed back node=%s: %s", self._nodename, error_of_ledger)
        finally:
            end_crashed(self._nodename, part, error)

    def refused(self, detail: str) -> None:
        """The cluster will not have this node. That may pass: nodes of an earlier life may not be declared dead yet."""
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since >= self._refused_for_s:
            end_refused(self._nodename, detail)

    def accepted(self) -> None:
        """The cluster has this node: an earlier refusal has passed."""
        self._refused_since = 0.0

    def close(self) -> None:
        """The node ends as it should: what its parts do from now on is no emergency, and nobody need watch it."""
        with self._arming:
            self._closed = True
            do_not_end()
