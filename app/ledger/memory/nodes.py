"""What nodes and supervisors ask, and the scans."""

from __future__ import annotations

from app.ledger.memory.ends import QUEUE_TIMEOUT, bury, declare_dead, end_attempt, end_request, remove_node, ring
from app.ledger.memory.state import PER_KIND, STONE_MS, Node, Store, ranked
from app.protocol.commands import (
    Cluster,
    ClusterAnswer,
    ClusterLease,
    ClusterNode,
    Deregister,
    Drain,
    FailureKind,
    Heartbeat,
    HeldClaim,
    HeldLease,
    Holdings,
    HoldingsAnswer,
    NodeAnswer,
    NodeStatus,
    ReadStatus,
    Register,
    ReportExit,
    Scan,
    ScanAnswer,
)
from app.protocol.tables import FailureReason, LeaseState, RequestState
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
    reasons = {other: why for other, node in store.nodes.items() if other != inc and (why := _differs(info, node))}
    for other, why in reasons.items():
        if store.fresh(other):
            return _refused(store, why)
    for other in reasons:  # silent: their next beat must not bring them back beside this node
        declare_dead(store, other)
    node = Node(info, command.node_ttl_ms, store.time, store.time + command.node_ttl_ms)
    if known:
        node.gauges, node.cursor = known.gauges, known.cursor
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


def report_exit(store: Store, command: ReportExit) -> ScanAnswer:
    inc = command.incarnation
    store.exited[inc] = store.time + STONE_MS
    if inc not in store.nodes:
        return ScanAnswer(ran=True, time_ms=store.time)
    recovered: list[str] = []
    declare_dead(store, inc)
    _, left = bury(store, inc, PER_KIND, recovered)
    records = [store.records[uid] for uid in recovered]
    bells = [ring(store, record) for record in records if record.state is RequestState.QUEUED]
    return ScanAnswer(True, store.time, tuple(bells), (), tuple(recovered), (inc,), left)


def scan(store: Store, command: Scan) -> ScanAnswer:
    store.advance_clock()
    if store.scanned >= 0 and store.time - store.scanned < command.min_age_ms:
        return ScanAnswer(ran=False, time_ms=store.time)
    store.scanned = store.time
    recovered: list[str] = []
    expired, more_expired = _expire(store)
    dead, more_dead = _recover(store, recovered)
    due = ranked(store.rings, upto=store.time, limit=PER_KIND)
    records = [store.records[uid] for uid in due]
    bells = tuple(ring(store, record) for record in records if record.state is RequestState.QUEUED)
    more = more_expired or more_dead or len(due) == PER_KIND
    for scores in (store.tombstones, store.exited):
        old = ranked(scores, upto=store.time, limit=PER_KIND)
        more = more or len(old) == PER_KIND
        for key in old:
            del scores[key]
    return ScanAnswer(True, store.time, bells, tuple(expired), tuple(recovered), tuple(dead), more)


def _expire(store: Store) -> tuple[list[str], bool]:
    due = ranked(store.deadlines, upto=store.time, limit=PER_KIND)
    for uid in due:
        record = store.records[uid]
        if record.state is RequestState.QUEUED:
            end_request(store, record, RequestState.EXPIRED, code=QUEUE_TIMEOUT, detail=record.last_failure)
        else:
            timeout = FailureReason.FIRST_TOKEN_TIMEOUT
            end_attempt(store, record, FailureKind.FAILURE, timeout, "", unused_lease=LeaseState.EXPIRED)
    return due, len(due) == PER_KIND


def _recover(store: Store, recovered: list[str]) -> tuple[list[str], bool]:
    scores = {inc: node.fresh_until for inc, node in store.nodes.items()}
    silent = ranked(scores, upto=store.time - 1, limit=PER_KIND)
    dead, budget, more = [], PER_KIND, len(silent) == PER_KIND
    for inc in silent:
        if store.nodes[inc].state != "dead":
            declare_dead(store, inc)
            dead.append(inc)
        taken, left = bury(store, inc, budget, recovered)
        budget -= taken
        more = more or left
    return dead, more


def holdings(store: Store, command: Holdings) -> HoldingsAnswer:
    node = store.nodes.get(command.incarnation)
    if node is None or node.state == "dead":
        return HoldingsAnswer(ReadStatus.UNKNOWN, store.time)
    claims, leases = [], []
    head = min(store.queue.values(), default=None)
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


def cluster(store: Store, command: Cluster) -> ClusterAnswer:
    scores = {inc: node.fresh_until for inc, node in store.nodes.items()}
    nodes = tuple(_shown_node(store, inc) for inc in ranked(scores, limit=_MOST_SHOWN))
    leases = tuple(_shown_lease(store, key) for key in ranked(store.open_leases, limit=_MOST_SHOWN))
    return ClusterAnswer(store.time, nodes, leases, len(store.queue), len(store.waiters))


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
