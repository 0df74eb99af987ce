"""``/health`` this process, ``/ready`` the service, ``/cluster`` every node and lease."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify

from app.errors import LedgerError
from app.protocol.commands import Cluster, ClusterLease, ClusterNode
from app.schemas import Health
from web.services import Services, services

blueprint = Blueprint("health", __name__)

ALIVE, DRAINING = "alive", "draining"
"""States of a node in the ledger."""
NEEDED_ROLES = ("prefill", "decode")


@blueprint.get("/health")
def health() -> tuple[Response, int]:
    """200 while this process can work at all; its supervisor should replace it otherwise."""
    these = services()
    faults = these.node.faults()
    body = {"status": "unhealthy" if faults else "ok", "reasons": faults, "incarnation": these.node.incarnation}
    return jsonify(body), 503 if faults else 200


@blueprint.get("/ready")
def ready() -> tuple[Response, int]:
    """200 if a request sent now can be served: the ledger takes writes, the broker takes messages, and prefill and
    decode have a healthy node."""
    reasons = _reasons(services())
    return jsonify({"ready": not reasons, "reasons": reasons}), 503 if reasons else 200


@blueprint.get("/cluster")
def cluster() -> Response:
    answer = services().ledger.execute(Cluster())
    return jsonify(
        {
            "nodes": [describe_node(n) for n in answer.nodes],
            "leases": [_describe_lease(lease) for lease in answer.leases],
            "version": answer.version,
            "queued": answer.queued,
            "waiting_for_grant": answer.waiting_for_grant,
        }
    )


def _reasons(these: Services) -> list[str]:
    reasons = these.node.faults() + these.node.ledger_faults()
    if these.process.draining:
        reasons.append("this web process is shutting down")
    try:
        nodes = these.ledger.execute(Cluster()).nodes
    except LedgerError as error:
        return [*reasons, f"the ledger cannot be read: {error}"]
    for role in NEEDED_ROLES:
        states = [_health_of(n) for n in nodes if n.node.role == role]
        if Health.HEALTHY not in states:
            reasons.append(f"no healthy {role} node" + (f" ({', '.join(sorted(states))})" if states else ""))
    broker_fault = these.broker_fault()
    return [*reasons, broker_fault] if broker_fault else reasons


def _health_of(node: ClusterNode) -> str:
    """What the ledger knows of it, then what it says of itself: a dead node does not call itself healthy."""
    says = node.gauges.health
    return says if node.state == ALIVE or (node.state, says) == (DRAINING, Health.DRAINED) else node.state


def describe_node(node: ClusterNode) -> dict[str, Any]:
    info, gauges = node.node, node.gauges
    return {
        "name": info.name,
        "role": info.role,
        "pid": info.pid,
        "host": info.host,
        "incarnation": info.incarnation,
        "reads_version": info.newest,
        "health": _health_of(node),
        "heartbeat_age_s": node.heartbeat_age_ms / 1000,
        "blocks": {"total": info.num_blocks, "free": 0, "cached": 0} | gauges.blocks,
        "sequences": {"running": gauges.running, "waiting": gauges.waiting},
        "refused": gauges.refused,
        "prefix_cache": gauges.prefix_cache,
    }


def _describe_lease(lease: ClusterLease) -> dict[str, Any]:
    return {
        "lease_id": lease.lease_id,
        "request_id": lease.client_id,
        "uid": lease.uid,
        "attempt": lease.attempt,
        "node": lease.node,
        "state": lease.state,
        "age_s": lease.age_ms / 1000,
        "blocks": lease.blocks,
    }
