"""Doorbells: Celery messages that say "look" and carry ids only. They may be lost, late or doubled without harm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from celery import Celery
from celery.utils.nodenames import worker_direct
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from app.lane import Lane
from app.protocol.commands import Bell
from app.settings import Settings

logger = logging.getLogger("baton.bells")

BELL_TASKS = {"prefill": "prefill.bell", "decode": "decode.bell"}
"""Queue → name of the task that rings there."""
BELL_EXPIRES_S = 60
"""An older bell is useless: ``ring_again`` has rung since."""
_PUBLISH_TIMEOUT_S = 2.0


def broker_options(settings: Settings, socket_timeout_s: float) -> dict[str, Any]:
    """Kombu's transport options: our own key prefix, and sockets that give up."""
    return {
        "global_keyprefix": f"{settings.namespace}:broker:",
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": _PUBLISH_TIMEOUT_S,
        "health_check_interval": 5,
        "retry_on_timeout": False,
    }


class Ringer(Protocol):
    """Rings doorbells; never raises, since a lost bell is rung again by the scan."""

    def ring(self, bell: Bell) -> None: ...
    def close(self) -> None: ...


class Bells:
    """Rings doorbells, and waits for the broker: up to two seconds each. Safe to use from several threads."""

    def __init__(self, settings: Settings) -> None:
        self._app = Celery("baton-bells", broker=settings.effective_broker_url, set_as_current=False)
        self._app.conf.update(
            # Without retries a frozen broker costs the timeout once per bell; with them it costs it three times.
            broker_transport_options=broker_options(settings, _PUBLISH_TIMEOUT_S) | {"max_retries": 0},
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
