"""The end of a worker that nobody wants: a part of it is dead, stuck, or does not end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from app.crash import end_crashed, end_in
from app.errors import LedgerError

CLOSING_S = 30.0
"""What a process may take to end once its node has drained."""

logger = logging.getLogger("baton.node")


class Emergency:
    """Ends the process of one node, with last words, within ``last_words_s``.

    ``last_words(part, why)`` hands back what the node holds; it may wait for the ledger, and raise LedgerError.
    """

    def __init__(
        self,
        nodename: str,
        *,
        stall_s: float,
        last_words_s: float,
        shut: Callable[[], None],
        last_words: Callable[[str, str], None],
    ) -> None:
        """``shut``: take no more work, from now on."""
        self.unhealthy = False
        self._nodename = nodename
        self._stall_s = stall_s
        self._last_words_s = last_words_s
        self._shut = shut
        self._last_words = last_words
        self._closed = False
        self._begun = threading.Lock()
        self._arming = threading.Lock()

    def watched(self) -> None:
        """The watchdog runs. It does not while one thread keeps the interpreter to itself: that ends the process."""
        with self._arming:
            if not self.unhealthy and not self._closed:
                end_in(self._stall_s + self._last_words_s)

    def crashed(self, part: str, error: BaseException) -> None:
        """A part is dead or stuck: it would hang requests in silence while heartbeats go on. From now on the node is
        unhealthy and takes nothing; what it holds goes back, and the process ends, whether that works or not."""
        if self._closed or not self._begun.acquire(blocking=False):
            return
        try:
            with self._arming:
                self.unhealthy = True
                end_in(self._last_words_s)
            self._shut()
            logger.critical("unhealthy node=%s part=%s: %s: %s", self._nodename, part, type(error).__name__, error)
            self._last_words(part, f"{self._nodename} is unhealthy: {part}: {error}")
        except LedgerError as error_of_ledger:
            logger.warning("nothing handed back node=%s: %s", self._nodename, error_of_ledger)
        finally:
            end_crashed(self._nodename, part, error)

    def close(self) -> None:
        """The node ends as it should: what its parts do from now on is no emergency, unless it never ends."""
        with self._arming:
            self._closed = True
            if not self.unhealthy:
                end_in(CLOSING_S)
