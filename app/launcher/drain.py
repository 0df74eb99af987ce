"""``baton drain``: have one node take nothing more, and wait until it holds nothing."""

from __future__ import annotations

import http.client
import threading
from typing import Any
from urllib.parse import quote

from app.errors import BatonError
from app.launcher.status import NothingAnswers, get_json
from app.launcher.wakeup import Deadline
from app.schemas import Health
from app.settings import Settings

GONE = "gone"
"""In place of the health of a node that has left the registry: it holds nothing, either."""
_LOOK_EVERY_S = 0.25


class DrainRefused(BatonError):
    """Web did not drain the node; the message is web's."""


def drain(settings: Settings, node: str, wait_s: float) -> dict[str, Any]:
    """Drain ``node`` and wait up to ``wait_s`` until it holds nothing. Answers it as ``/cluster`` last showed it.

    Raises:
        NothingAnswers: nothing answers there.
        DrainRefused: there is no such node, or it cannot be drained now.
    """
    status, shown = get_json(settings, f"/cluster/nodes/{quote(node, safe='')}/drain", "POST")
    if status != http.client.OK:
        raise DrainRefused(str(shown.get("error", {}).get("message", f"web answers {status}")))
    deadline, pause = Deadline(wait_s), threading.Event()
    while shown["health"] not in (Health.DRAINED, GONE) and not deadline.passed:
        pause.wait(min(_LOOK_EVERY_S, deadline.left_s))
        shown = _look(settings, shown)
    return shown


def _look(settings: Settings, last: dict[str, Any]) -> dict[str, Any]:
    try:
        status, cluster = get_json(settings, "/cluster")
    except NothingAnswers:
        return last  # web is away for a moment
    if status != http.client.OK:
        return last  # the ledger is
    for node in cluster["nodes"]:
        if node["incarnation"] == last["incarnation"]:
            return dict(node)
    return {**last, "health": GONE}
