"""What nodes ask about themselves: register, heartbeat, drain, deregister, holdings; and the cluster view."""

from __future__ import annotations

from app.ledger.memory.recovery import declare_dead, remove_node
from app.ledger.memory.state import WALK, Node, Store, ranked
from app.protocol.commands import (
    Cluster,
    ClusterAnswer,
    ClusterLease,
    ClusterNode,
    Deregister,
    Drain,
    Heartbeat,
    HeldClaim,
    HeldLease,
    Holdings,
    HoldingsAnswer,
    NodeAnswer,
    NodeStatus,
    ReadStatus,
    Register,
)
from app.schemas import NodeInfo

_KV_ROLES = ("prefill", "decode")
_MOST_SHOWN = 1000


def register(store: Store, command: Register) -> NodeAnswer:
    info = command.node
    inc = info.incarnation
    if inc in store.exited:
        return _refused(store, "the exit of this incarnation has been reported")
    known = store.nodes.get(inc)
    if known and known.state == "dead" and store.owned.get(inc):
        return _refused(store, "it was declared dead and what it owned is not yet taken back")
    others = sorted(store.nodes.items())
    reasons = {other: why for other, node in others if other != inc and (why := _differs(info, node))}
    for other, why in reasons.items():
        if store.fresh(other):
            return _refused(store, why)
    for other in reasons:  # silent: their next beat must not bring them back beside this node
        declare_dead(store, other)
    node = Node(info, command.node_ttl_ms, store.time, store.time + command.node_ttl_ms)
    if known:
        node.gauges, node.cursor, node.suspect = known.gauges, known.cursor, known.suspect
        node.state = "draining" if known.state == "draining" else "alive"
    store.nodes[inc] = node
    return NodeAnswer(NodeStatus.OK, store.time)


def _differs(info: NodeInfo, node: Node) -> str:
    """Why the two cannot serve together; empty if they can."""
    theirs = node.info
    if node.state == "dead":
        return ""
    if info.model and theirs.model and info.model != theirs.model:
        return f"its model is {info.model}, but living nodes have {theirs.model} ({theirs.name})"
    if info.role in _KV_ROLES and theirs.role in _KV_ROLES and info.layout != theirs.layout:
        return f"its KV layout is {info.layout}, but living nodes have {theirs.layout} ({theirs.name})"
    return ""


def _refused(store: Store, detail: str) -> NodeAnswer:
    return NodeAnswer(NodeStatus.REFUSED, store.time, detail)


def heartbeat(store: Store, command: Heartbeat) -> NodeAnswer:
    store.advance_clock()
    node = store.nodes.get(command.incarnation)
    if node is None or node.state == "dead":
        return NodeAnswer(NodeStatus.UNKNOWN, store.time)
    node.heartbeat, node.fresh_until, node.gauges = store.time, store.time + node.ttl, command.gauges
    return NodeAnswer(NodeStatus.DRAINING if node.state == "draining" else NodeStatus.OK, store.time)


def drain(store: Store, command: Drain) -> NodeAnswer:
    node = store.nodes.get(command.incarnation)
    if node is None or node.state == "dead":
        return NodeAnswer(NodeStatus.UNKNOWN, store.time)
    node.state = "draining"
    return NodeAnswer(NodeStatus.OK, store.time)


def deregister(store: Store, command: Deregister) -> NodeAnswer:
    node = store.nodes.get(command.incarnation)
    if node is None or node.state == "dead":
        return NodeAnswer(NodeStatus.UNKNOWN, store.time)
    owned = store.owned.get(command.incarnation)
    if owned:
        return _refused(store, f"it still owns {len(owned)}")
    remove_node(store, command.incarnation)
    return NodeAnswer(NodeStatus.OK, store.time)


def holdings(store: Store, command: Holdings) -> HoldingsAnswer:
    node = store.nodes.get(command.incarnation)
    if node is None or node.state == "dead":
        return HoldingsAnswer(ReadStatus.UNKNOWN, store.time)
    claims, leases = [], []
    head = _head(store, node)
    for member in ranked(store.owned.get(command.incarnation, {})):
        kind, key = member[0], member[2:]
        if kind == "c":
            record = store.records[key]
            older_waits = head is not None and head < record.seq
            claims.append(HeldClaim(key, record.attempt, record.fence, record.state, older_waits))
        elif kind == "l":
            lease = store.leases[key]
            leases.append(HeldLease(key, lease.uid, lease.attempt, lease.fence, lease.state))
    return HoldingsAnswer(
        ReadStatus.FOUND, store.time, tuple(claims), tuple(leases), len(store.queue), len(store.waiters)
    )


def _head(store: Store, node: Node) -> int | None:
    """Admission number of the oldest QUEUED request that may come here: a second suspect does not."""
    for uid in ranked(store.queue, limit=WALK if node.suspect else 1):
        if not (node.suspect and store.records[uid].suspect):
            return store.queue[uid]
    return None


def cluster(store: Store, command: Cluster) -> ClusterAnswer:
    scores = {inc: node.fresh_until for inc, node in store.nodes.items()}
    nodes = tuple(_shown_node(store, inc) for inc in ranked(scores, limit=_MOST_SHOWN))
    leases = tuple(_shown_lease(store, key) for key in ranked(store.open_leases, limit=_MOST_SHOWN))
    return ClusterAnswer(store.time, nodes, leases, len(store.queue), len(store.waiters), store.version)


def _shown_node(store: Store, inc: str) -> ClusterNode:
    node = store.nodes[inc]
    state = node.state if node.state == "dead" or store.fresh(inc) else "stale"
    return ClusterNode(node.info, node.gauges, state, store.time - node.heartbeat)


def _shown_lease(store: Store, key: str) -> ClusterLease:
    lease = store.leases[key]
    node = store.nodes.get(lease.node)
    client = store.records[lease.uid].client_id
    name = node.info.name if node else lease.node
    return ClusterLease(key, lease.uid, client, lease.attempt, name, lease.state, store.time - lease.at, lease.blocks)
