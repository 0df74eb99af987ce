"""How our processes are connected to Celery's broker: sockets that give up soon, and tries that stay frequent."""

from __future__ import annotations

from typing import Any

from celery.app.amqp import AMQP
from kombu.connection import Connection

from app.settings import Settings

ANSWER_S = 2.0
"""For a connection, and for an answer. Whoever waits for the broker can do nothing else meanwhile."""
HEALTH_CHECK_S = 2
"""How often the connections that wait for messages are looked at. A server answers BRPOP within 1 s: without an answer
for 3 s the connection is dead, whatever the kernel knows of it."""
TRY_AGAIN_S = 1.0
"""Pause between tries to connect. Celery's own grows to 30 s: after a long outage work would wait that long for it."""


def broker_options(settings: Settings) -> dict[str, Any]:
    """Kombu's transport options: our own key prefix, and sockets that give up."""
    return {
        "global_keyprefix": f"{settings.namespace}:broker:",
        "socket_timeout": ANSWER_S,
        "socket_connect_timeout": ANSWER_S,
        "health_check_interval": HEALTH_CHECK_S,
        "retry_on_timeout": False,
    }


class BrokerConnection(Connection):
    """Tries again every ``TRY_AGAIN_S``, for as long as whoever connects wants to try."""

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        """As kombu's; workers and beat call it."""
        pace = {"interval_start": TRY_AGAIN_S, "interval_step": 0.0, "interval_max": TRY_AGAIN_S}
        return super().ensure_connection(*args, **(pace | options))  # type: ignore[no-untyped-call]


class Amqp(AMQP):  # type: ignore[misc]
    """For ``Celery(amqp=...)``: its connections are ours."""

    Connection = BrokerConnection
