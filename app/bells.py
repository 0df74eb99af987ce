"""Doorbells: Celery messages that say "look" and carry ids only. They may be lost, late or doubled without harm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from celery import Celery
from celery.utils.nodenames import worker_direct
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from app.broker import broker_options
from app.lane import Lane
from app.protocol.commands import Bell
from app.settings import Settings

logger = logging.getLogger("baton.bells")

BELL_TASKS = {"prefill": "prefill.bell", "decode": "decode.bell"}
"""Queue → name of the task that rings there."""
BELL_EXPIRES_S = 60
"""An older bell is useless: ``ring_again`` has rung since."""


class Ringer(Protocol):
    """Rings doorbells; never raises, since a lost bell is rung again by the scan."""

    def ring(self, bell: Bell) -> None: ...
    def close(self) -> None: ...


class Broker(Ringer, Protocol):
    """A ringer that knows how things are."""

    def fault(self) -> str: ...


class Bells:
    """Rings doorbells, and waits for the broker: up to two seconds each. Safe to use from several threads."""

    def __init__(self, settings: Settings) -> None:
        self._app = Celery("baton-bells", broker=settings.effective_broker_url, set_as_current=False)
        self._app.conf.update(
            # Without retries a frozen broker costs the timeout once per bell; with them it costs it three times.
            broker_transport_options=broker_options(settings) | {"max_retries": 0},
            broker_connection_retry=False,
            task_ignore_result=True,
            task_send_sent_event=True,
            task_default_delivery_mode="transient",
        )

    def ring(self, bell: Bell) -> None:
        """Ring on a role's queue. A bell that cannot be rung is lost, as any may be: the scan rings again."""
        self._publish(bell.queue, bell.queue, bell.uid, bell.attempt)

    def ring_node(self, queue: str, nodename: str) -> None:
        """Ring one worker, ``nodename`` as Celery knows it, on its direct queue: there may be work for its role."""
        self._publish(queue, worker_direct(nodename), "", 0)

    def fault(self) -> str:
        """Why no bell can be rung now; empty if one can. Waits as ``ring`` does.

        It writes, on a new connection: a broker that is full or read-only answers all the same.
        """
        try:
            with self._app.connection_for_write() as connection:
                connection.default_channel.client.set("asked", 1, ex=BELL_EXPIRES_S)
        except (OperationalError, RedisError, OSError) as error:
            return f"the broker takes no messages: {error}"
        return ""

    def close(self) -> None:
        """Give the connections back."""
        self._app.close()

    def _publish(self, role: str, queue: Any, uid: str, attempt: int) -> None:
        try:
            self._app.send_task(
                BELL_TASKS[role], (uid, attempt), queue=queue, expires=BELL_EXPIRES_S, retry=False, ignore_result=True
            )
        except (OperationalError, RedisError, OSError) as error:
            logger.warning("bell lost queue=%s uid=%s attempt=%s: %s", role, uid, attempt, error)


class BellLane(Lane[Bell]):
    """Rings through ``bells`` on a thread of its own, for those who must not wait for the broker.

    A bell that waits already is not put in line again: however long the broker is away, no more wait than there are
    attempts to ring for.
    """

    def __init__(self, bells: Ringer, on_crash: Callable[[str, BaseException], None]) -> None:
        super().__init__("bells", self._ring_all, on_crash)
        self._bells = bells
        self._waiting: set[Bell] = set()

    def ring(self, bell: Bell) -> None:
        """Ring soon. Never blocks."""
        if bell not in self._waiting:
            self._waiting.add(bell)
            self.put(bell)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ring what waits, end the thread, and give the connections back."""
        super().close(timeout_s)
        self._bells.close()

    def _ring_all(self, batch: list[Bell]) -> None:
        for bell in batch:
            self.entered()
            self._waiting.discard(bell)  # first: whoever rings from now on may have seen something new
            self._bells.ring(bell)
