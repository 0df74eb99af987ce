"""``baton status``: what the web server says of the cluster, for a person or a script."""

from __future__ import annotations

import http.client
import json
from typing import Any

from app.errors import BatonError
from app.launcher.readiness import http_get, http_url
from app.settings import Settings

_TIMEOUT_S = 5.0
_HEADINGS = ("NODE", "ROLE", "HEALTH", "HEARTBEAT", "FREE BLOCKS", "RUNNING", "WAITING", "PID")


class NothingAnswers(BatonError):
    """There is no Baton at this address."""


def fetch_status(settings: Settings) -> dict[str, Any]:
    """What ``/cluster`` says (nodes, leases, …), with ``"ready": bool`` and ``"reasons": [str]`` of ``/ready``.

    Only these two when the nodes cannot be listed: the ledger does not answer.

    Raises:
        NothingAnswers: nothing, or something else, answers there.
    """
    status, ready = get_json(settings, "/ready")
    if status not in (http.client.OK, http.client.SERVICE_UNAVAILABLE) or "ready" not in ready:
        raise NothingAnswers(f"what answers at {http_url(settings.host, settings.port)} is not Baton")
    cluster_status, cluster = get_json(settings, "/cluster")
    listed = cluster if cluster_status == http.client.OK else {}
    return {**listed, "ready": status == http.client.OK, "reasons": ready.get("reasons", [])}


def render_status(status: dict[str, Any]) -> str:
    """The status as text of a few lines and a table of nodes."""
    lines = ["ready" if status["ready"] else "not ready: " + ("; ".join(status["reasons"]) or "no reason given")]
    if "nodes" not in status:
        return "\n".join([*lines, "the nodes cannot be listed"])
    lines.append(
        f"{status['queued']} queued, {status['waiting_for_grant']} waiting for a decode node,"
        f" {len(status['leases'])} leases"
    )
    rows = [_HEADINGS, *sorted(_row(node) for node in status["nodes"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    blocks, sequences = node["blocks"], node["sequences"]
    return (
        node["name"],
        node["role"],
        node["health"],
        f"{node['heartbeat_age_s']:.1f} s ago",
        f"{blocks['free'] + blocks['cached']} of {blocks['total']}" if blocks["total"] else "-",
        str(sequences["running"]),
        str(sequences["waiting"]),
        str(node["pid"]),
    )


def get_json(settings: Settings, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    """Status and JSON object of what web answers; an empty object where it is none. Raises NothingAnswers."""
    url = http_url(settings.host, settings.port)
    try:
        status, body = http_get(settings.host, settings.port, path, _TIMEOUT_S, method)
        answer = json.loads(body)
    except (OSError, http.client.HTTPException) as error:
        raise NothingAnswers(f"nothing answers at {url} ({error}): is `baton up` running there?") from None
    except ValueError:
        raise NothingAnswers(f"what answers at {url} is not Baton") from None
    return status, answer if isinstance(answer, dict) else {}
