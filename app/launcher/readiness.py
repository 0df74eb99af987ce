"""What is still missing until a request can be served: seen from outside, as a client sees it."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Protocol

from app.errors import LedgerError
from app.protocol.commands import Cluster, ClusterAnswer

_ALIVE, _HEALTHY = "alive", "healthy"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104


class ClusterLedger(Protocol):
    """The part of a ledger that is needed here."""

    def execute(self, command: Cluster, /) -> ClusterAnswer: ...


def reachable_host(host: str) -> str:
    """Where a client on this machine reaches a server that listens on ``host``."""
    return _WILDCARDS.get(host, host)


def http_url(host: str, port: int) -> str:
    """URL of a server for a client on this machine."""
    host = reachable_host(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_get(host: str, port: int, path: str, timeout_s: float, method: str = "GET") -> tuple[int, bytes]:
    """GET (or POST without a body) from a server on this machine, without any proxy.

    Raises:
        OSError: nothing answers there.
        http.client.HTTPException: what answers does not speak HTTP.
    """
    connection = http.client.HTTPConnection(reachable_host(host), port, timeout=timeout_s)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def answers(host: str, port: int, path: str, timeout_s: float = 1.0) -> bool:
    """True when GET gives 200."""
    try:
        return http_get(host, port, path, timeout_s)[0] == http.client.OK
    except (OSError, http.client.HTTPException):
        return False


def missing_nodes(ledger: ClusterLedger, incarnations: Mapping[str, str]) -> list[str]:
    """Names (of ``incarnations``: name → incarnation) that the ledger does not list as alive and healthy."""
    try:
        cluster = ledger.execute(Cluster())
    except LedgerError:
        return sorted(incarnations)
    alive = {
        entry.node.incarnation for entry in cluster.nodes if (entry.state, entry.gauges.health) == (_ALIVE, _HEALTHY)
    }
    return sorted(name for name, incarnation in incarnations.items() if incarnation not in alive)
