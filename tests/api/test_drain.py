"""``POST /cluster/nodes/{name}/drain``: what an admin asks of one node."""

from __future__ import annotations

from typing import Any

from app.ledger.api import Ledger
from app.protocol.commands import Drain, Heartbeat, NodeAnswer, NodeStatus, Register
from app.schemas import Gauges, Health, NodeInfo
from tests.api.conftest import MakeRig, Rig
from tests.api.test_surface import error_of


def drain(rig: Rig, name: str) -> Any:
    return rig.post(f"/cluster/nodes/{name}/drain", b"")


def shown(rig: Rig, name: str) -> dict[str, Any]:
    nodes: Any = rig.get("/cluster").json["nodes"]  # type: ignore[index]
    return next(dict(node) for node in nodes if node["name"] == name)


def add_decode(rig: Rig, name: str, incarnation: str) -> NodeInfo:
    node = NodeInfo(
        incarnation=incarnation, role="decode", name=name, pid=2, host="test", model="toy-1", layout="toy", num_blocks=9
    )
    rig.ledger.execute(Register(node, 60_000))
    return node


def test_a_drained_node_gets_nothing_more_and_asking_again_changes_nothing(rig: Rig) -> None:
    for _ in range(2):
        answer = drain(rig, "decode1")
        assert answer.status_code == 200
        assert (answer.json["name"], answer.json["health"]) == ("decode1", "draining")
    assert set(answer.json) == set(shown(rig, "decode1"))
    ready: Any = rig.get("/ready").json
    assert ready["reasons"] == ["no healthy decode node (draining)"]


def test_a_node_is_found_by_its_name_with_and_without_host_and_by_its_incarnation(rig: Rig) -> None:
    for name in ("decode7@host.a", "decode8@host.a", "decode9@host.a"):
        add_decode(rig, name, f"i-{name[6]}")
    for name in ("decode7@host.a", "decode8", "i-9"):
        assert drain(rig, name).json["health"] == "draining"
    assert {shown(rig, f"decode{n}@host.a")["health"] for n in (7, 8, 9)} == {"draining"}


def test_a_node_that_says_so_is_shown_as_drained(rig: Rig) -> None:
    add_decode(rig, "decode7@h", "i7")
    drain(rig, "decode7")
    for health in (Health.HEALTHY, Health.DRAINING):  # it has not heard of it yet, or still holds something
        assert rig.ledger.execute(Heartbeat("i7", Gauges(health=health))).status is NodeStatus.DRAINING
        assert shown(rig, "decode7@h")["health"] == "draining"
    rig.ledger.execute(Heartbeat("i7", Gauges(health=Health.DRAINED)))
    assert shown(rig, "decode7@h")["health"] == "drained"


def test_an_unknown_a_dead_and_an_ambiguous_name_are_refused_and_nothing_is_drained(rig: Rig) -> None:
    assert "decode1, prefill1" in error_of(drain(rig, "decode7"), 404, "node_not_found")["message"]
    add_decode(rig, "decode7@a", "i7a")
    add_decode(rig, "decode7@b", "i7b")
    message = error_of(drain(rig, "decode7"), 400, "invalid_value")["message"]
    assert "decode7@a (i7a)" in message
    assert "decode7@b (i7b)" in message
    ledger: Any = rig.ledger
    ledger.store.nodes["i7a"].fresh_until = 0
    assert drain(rig, "decode7").json["incarnation"] == "i7b"  # the other one is silent
    error_of(drain(rig, "i7a"), 404, "node_not_found")


def test_web_and_control_have_nothing_to_drain(rig: Rig) -> None:
    name = next(node["name"] for node in rig.get("/cluster").json["nodes"] if node["role"] == "web")  # type: ignore[index]
    assert "only prefill and decode" in error_of(drain(rig, name), 400, "invalid_value")["message"]
    assert rig.complete().status_code == 200


class Slow:
    """A ledger that has a drain in its hands only when it may not be applied any more."""

    def __init__(self, inner: Ledger) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute(self, command: Any) -> Any:
        return NodeAnswer(NodeStatus.LATE, 0) if isinstance(command, Drain) else self.inner.execute(command)


def test_a_drain_that_the_ledger_did_not_take_in_time_is_an_error_to_try_again_on(make_rig: MakeRig) -> None:
    slow: Any = Slow
    rig = make_rig(wrap=slow)
    answer = drain(rig, "decode1")
    error_of(answer, 503, "service_unavailable")
    assert (answer.headers["x-should-retry"], answer.headers["Retry-After"]) == ("true", "1")
    assert shown(rig, "decode1")["health"] == "healthy"
