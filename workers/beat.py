"""Beat's scheduler: it says once that the broker is away, and once that it is back.

Celery's own writes four tracebacks for each tick that is not sent, one a second. A tick that is lost does no harm:
every node scans when nobody else does.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.beat import PersistentScheduler, SchedulingError

logger = logging.getLogger("baton.beat")


class Scheduler(PersistentScheduler):  # type: ignore[misc]
    """Sends what is due. Nothing else differs from Celery's."""

    _away = False

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send one entry; a broker that does not take it is no reason to stop."""
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            self._complain(error)
        else:
            if self._away:
                logger.info("the broker answers again")
            self._away = False

    def _ensure_connected(self) -> Any:
        """The first connection; waits for it as long as it takes."""
        return self.connection.ensure_connection(lambda error, interval_s: self._complain(error))

    def _complain(self, error: Exception) -> None:
        if not self._away:
            logger.warning("the broker (BATON_BROKER_URL, else BATON_REDIS_URL) does not answer: %s", error)
        self._away = True
