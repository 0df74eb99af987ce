"""The one loop behind every answer: tokens in, deltas out, and an eye on the client, the clock and the shutdown."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence

from app.errors import ApiError, ServiceUnavailable
from web.admission import Job, leave
from web.answer import Answer, Delta
from web.client import Client, ClientGone
from web.ends import Ended
from web.feed import OUTAGE_S
from web.feeds import Feeds
from web.logs import log_event
from web.services import Services

TICK_S = 0.5
"""How often the client's socket and the shutdown are looked at."""
PING_S = 5.0
"""Something is written after so much quiet, so that proxies keep the connection and a dead one shows."""


class Outage:
    """A ledger that can be read and not written to (a replica, one that is full) tells nothing more of any answer."""

    def __init__(self) -> None:
        self._since: float | None = None

    def look(self, faults: Sequence[str], now: float) -> None:
        """Raises ServiceUnavailable when there have been ``faults`` for OUTAGE_S, as seen from here."""
        if not faults:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= OUTAGE_S:
            raise ServiceUnavailable("; ".join(faults))


class Ping:
    """Nothing new for PING_S."""


PING = Ping()


def relay(
    services: Services, job: Job, answers: Sequence[Answer], client: Client
) -> Generator[Delta | Ping, None, None]:
    """Yield what the job's client should get, ending with the last of the deltas that have a finish reason.

    Closing the iterator at any point counts as the client's leaving. Start it: only then is the job cleaned up.

    Raises:
        ApiError: the request ended without success.
        ClientGone: nobody is there to be told.
    """
    feeds = Feeds(services.ledger, job.uids, job.watcher, job.mailbox, job.records)
    left = len(answers)
    outcome: dict[str, object] = {"outcome": "internal_error"}
    try:
        sent_at = looked_at = time.monotonic()
        outage = Outage()
        while True:
            news = feeds.next(TICK_S)
            now = time.monotonic()
            if news is not None:
                index, progress = news
                delta = answers[index].add(progress)
                left -= delta.finish_reason is not None
                sent_at = now
                yield delta
                if not left:
                    reasons = sorted({str(answer.finish_reason) for answer in answers})
                    outcome = {"outcome": "finished", "finish_reason": "/".join(reasons)}
                    return
            elif now - sent_at >= PING_S:
                sent_at = now
                yield PING
            if now - looked_at >= TICK_S:
                looked_at = now
                _look_around(services, client)
                outage.look(services.node.ledger_faults(), now)
    except (ClientGone, GeneratorExit):
        outcome = {"outcome": "client_gone"}
        raise
    except Ended as end:
        # Detached all the same: the record may go on, where only this answer cannot.
        outcome = {"outcome": end.error.code, "error": end.error}
        raise end.error from None
    except ApiError as error:
        outcome = {"outcome": error.code, "error": error}
        raise
    finally:
        level = logging.WARNING if left else logging.INFO
        output_tokens = sum(len(answer.token_ids) for answer in answers)
        log_event(level, "answered", request_id=job.client_id, uid=job.uids[0], **outcome, output_tokens=output_tokens)
        leave(services, job, ended=not left, attach_until_ms=feeds.attach_until_ms)


def _look_around(services: Services, client: Client) -> None:
    if client.gone():
        raise ClientGone
    if services.process.drain_over:
        raise ServiceUnavailable("this web process is shutting down; try again", retry_after_s=1)
