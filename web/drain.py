"""``POST /cluster/nodes/{name}/drain``: one prefill or decode node takes nothing more; its process goes on.

An admin's route: it acts on the cluster, not on a request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flask import Blueprint, Response, jsonify

from app.errors import InvalidRequest, NodeNotFound, ServiceUnavailable
from app.protocol.commands import Cluster, ClusterNode, Drain, NodeStatus
from web.health import ALIVE, DRAINING, NEEDED_ROLES, describe_node
from web.logs import log_event
from web.services import services

blueprint = Blueprint("drain", __name__)


@blueprint.post("/cluster/nodes/<name>/drain")
def drain_node(name: str) -> Response:
    """Have the node drained; answers the node as ``/cluster`` shows it. Asking again changes nothing."""
    ledger = services().ledger
    node = _find(name, ledger.execute(Cluster()).nodes)
    if node.node.role not in NEEDED_ROLES:
        raise InvalidRequest(f"{name} is a {node.node.role} node: only prefill and decode nodes can be drained")
    incarnation = node.node.incarnation
    status = ledger.execute(Drain(incarnation)).status
    if status is NodeStatus.LATE:
        raise ServiceUnavailable("the ledger did not take the drain in time; try again", retry_after_s=1)
    log_event(logging.WARNING, "drain", node=node.node.name, incarnation=incarnation, status=status)
    return jsonify(describe_node(_find(incarnation, ledger.execute(Cluster()).nodes)))


def _find(name: str, nodes: Sequence[ClusterNode]) -> ClusterNode:
    """The living node with this name, with or without its ``@host``, or with this incarnation."""
    living = [node for node in nodes if node.state in (ALIVE, DRAINING)]
    found = [node for node in living if name in (node.node.incarnation, node.node.name)]
    found = found or [node for node in living if name == node.node.name.split("@")[0]]
    if len(found) > 1:
        which = ", ".join(f"{node.node.name} ({node.node.incarnation})" for node in found)
        raise InvalidRequest(f"{name} is the name of {len(found)} nodes: {which}; name one by its incarnation")
    if not found:
        raise NodeNotFound(f"no living node is called {name}; there are: {_names(living)}")
    return found[0]


def _names(nodes: Sequence[ClusterNode]) -> str:
    return ", ".join(sorted(node.node.name for node in nodes if node.node.role in NEEDED_ROLES)) or "none"
