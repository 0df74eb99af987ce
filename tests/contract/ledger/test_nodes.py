"""register, heartbeat, drain, deregister, report_exit, holdings, cluster; and ledger time."""

from __future__ import annotations

from typing import Any

import pytest

from app.protocol.commands import (
    Bell,
    Cluster,
    Deregister,
    Drain,
    Heartbeat,
    HeldClaim,
    HeldLease,
    Holdings,
    NodeStatus,
    ReadStatus,
    Register,
    ReportExit,
    Scan,
)
from app.schemas import Gauges, NodeInfo
from tests.contract.ledger.support import World


def test_a_registered_node_is_alive_and_is_shown_with_what_it_said(world: World) -> None:
    assert world.node("p", "prefill").status is NodeStatus.OK
    assert world.beat("p", health="stalled", blocks={"FREE": 3}, running=2).status is NodeStatus.OK
    (shown,) = world.do(Cluster()).nodes
    assert (shown.node.incarnation, shown.node.address, shown.state) == ("p", "tcp://p", "alive")
    assert (shown.gauges.health, shown.gauges.blocks, shown.gauges.running) == ("stalled", {"FREE": 3}, 2)


def test_every_node_answer_names_the_life_of_the_server(world: World) -> None:
    answer = world.node("p", "prefill")
    assert answer.run_id
    assert answer.run_id == world.beat("p").run_id


def test_a_kv_node_with_another_layout_is_refused_while_others_live(world: World) -> None:
    world.node("p", "prefill", layout="one", ttl=10)
    answer = world.node("d", "decode", layout="two")
    assert answer.status is NodeStatus.REFUSED
    assert "one" in answer.detail
    assert "two" in answer.detail
    assert world.node("w", "web").status is NodeStatus.OK
    world.advance(11)
    assert world.node("d", "decode", layout="two").status is NodeStatus.OK


@pytest.mark.parametrize(("first", "second"), [("web", "decode"), ("prefill", "web"), ("web", "web")])
def test_a_node_of_another_model_is_refused_while_others_live(world: World, first: Any, second: Any) -> None:
    world.node("a", first, model="one", layout="", ttl=10)
    answer = world.node("b", second, model="two", layout="")
    assert answer.status is NodeStatus.REFUSED
    assert "one (a@host)" in answer.detail
    assert "two" in answer.detail
    assert set(world.dump()["nodes"]) == {"a"}
    for incarnation, more in (("c", {"role": "control"}), ("d", {"role": second, "model": "one", "layout": ""})):
        assert world.node(incarnation, **more).status is NodeStatus.OK
    assert world.do(Deregister("d")).status is NodeStatus.OK
    assert world.do(Deregister("a")).status is NodeStatus.OK
    assert world.node("b", second, model="two", layout="").status is NodeStatus.OK


@pytest.mark.parametrize("what", ["model", "layout"])
def test_a_silent_node_that_differs_cannot_come_back_beside_what_took_its_place(world: World, what: str) -> None:
    world.node("d", "decode", ttl=10, **{what: "old"})
    world.node("p", "prefill", ttl=10, **{what: "old"})
    world.node("w", "web", ttl=10, **({what: "old"} if what == "model" else {}))
    world.advance(11)
    assert world.node("d2", "decode", **{what: "new"}).status is NodeStatus.OK
    assert world.beat("p").status is NodeStatus.UNKNOWN
    assert world.beat("w").status is (NodeStatus.UNKNOWN if what == "model" else NodeStatus.OK)
    refused = world.node("p", "prefill", **{what: "old"})
    assert (refused.status, "new (d2@host)" in refused.detail) == (NodeStatus.REFUSED, True)


def test_registering_again_is_fine_and_keeps_a_drain(world: World) -> None:
    world.cluster()
    world.prefilling()
    assert world.node("p", "prefill").status is NodeStatus.OK
    assert world.owned("p") == {"c:u"}
    world.do(Drain("p"))
    world.node("p", "prefill")
    assert world.beat("p").status is NodeStatus.DRAINING


def test_a_dead_node_registers_again_once_nothing_of_it_is_left(world: World) -> None:
    world.node("p", "prefill", ttl=10)
    world.advance(11)
    world.scan()
    assert world.beat("p").status is NodeStatus.UNKNOWN
    assert world.node("p", "prefill").status is NodeStatus.OK
    assert world.beat("p").status is NodeStatus.OK


def test_a_dead_node_that_still_owns_something_may_not_register(world: World) -> None:
    world.cluster()
    world.node("w2", "web")
    for i in range(130):
        world.admit(f"u{i}", web="w2", max_queued=1000)
    answer = world.exit("w2")
    assert answer.more
    assert world.node("w2", "web").status is NodeStatus.REFUSED
    assert world.beat("w2").status is NodeStatus.UNKNOWN
    assert not world.scan().more
    assert "w2" not in world.dump()["nodes"]
    assert world.state("u129") == "ABORTED"


def test_a_node_declared_dead_by_a_scan_waits_until_all_it_had_is_taken_back(world: World) -> None:
    world.cluster()
    world.node("w2", "web", ttl=10)
    for i in range(130):
        world.admit(f"u{i}", web="w2", max_queued=1000)
    world.advance(11)
    assert world.scan().more
    answer = world.node("w2", "web")
    assert (answer.status, "dead" in answer.detail) == (NodeStatus.REFUSED, True)
    world.scan()
    assert world.node("w2", "web").status is NodeStatus.OK


def test_an_unknown_node_is_not_made_by_its_heartbeat(world: World) -> None:
    assert world.beat("p").status is NodeStatus.UNKNOWN
    assert world.do(Cluster()).nodes == ()


def test_a_silent_node_that_beats_before_it_is_declared_dead_goes_on(world: World) -> None:
    world.node("p", "prefill", ttl=10)
    world.advance(11)
    assert world.do(Cluster()).nodes[0].state == "stale"
    assert world.beat("p").status is NodeStatus.OK
    assert world.scan().dead == ()


def test_drain_and_deregister(world: World) -> None:
    world.cluster()
    world.prefilling()
    assert world.do(Drain("p")).status is NodeStatus.OK
    refused = world.do(Deregister("p"))
    assert (refused.status, refused.detail) == (NodeStatus.REFUSED, "it still owns 1")
    world.fail("u")
    assert world.do(Deregister("p")).status is NodeStatus.OK
    for command in (Drain("p"), Deregister("p")):
        assert world.do(command).status is NodeStatus.UNKNOWN
    assert world.beat("p").status is NodeStatus.UNKNOWN


def test_a_reported_exit_fails_what_the_node_owned_and_rings_for_it(world: World) -> None:
    world.cluster()
    world.decoding("u", "f", "l")
    world.prefilling("v", "g")
    world.reserve("l2", "v")
    answer = world.exit("d")
    assert answer.dead == ("d",)
    assert sorted(answer.recovered) == ["u", "v"]
    assert sorted(answer.bells, key=lambda bell: bell.uid) == [Bell("prefill", "u", 2), Bell("prefill", "v", 2)]
    assert (world.lease_state("l"), world.lease_state("l2")) == ("RELEASED", "CANCELLED")
    assert "d" not in world.dump()["nodes"]
    assert world.read("u").failures == 1


def test_an_exit_is_final_for_its_incarnation(world: World) -> None:
    world.exit("p")
    assert world.node("p", "prefill").status is NodeStatus.REFUSED
    assert world.exit("p").ran


def test_holdings_are_the_claims_and_leases_of_a_node(world: World) -> None:
    world.cluster()
    world.decoding("u", "f", "l")
    world.prefilling("v", "g")
    world.reserve("l2", "v")
    world.prefilling("x", "h")
    world.admit("y")
    decode, prefill = world.do(Holdings("d")), world.do(Holdings("p"))
    assert decode.status is ReadStatus.FOUND
    assert decode.claims == (HeldClaim("u", 1, "f", "DECODING"),)
    assert set(decode.leases) == {HeldLease("l", "u", 1, "f", "ACTIVE"), HeldLease("l2", "v", 1, "g", "RESERVED")}
    assert {claim.uid for claim in prefill.claims} == {"v", "x"}
    assert (prefill.leases, prefill.queued, prefill.waiting_for_grant) == ((), 1, 1)
    assert world.do(Holdings("nobody")).status is ReadStatus.UNKNOWN


def test_the_cluster_shows_open_leases_and_lines(world: World) -> None:
    world.cluster()
    world.decoding("u", "f", "l")
    world.prefilling("v", "g")
    world.admit("x")
    world.advance(250)
    answer = world.do(Cluster())
    (lease,) = answer.leases
    assert (lease.lease_id, lease.uid, lease.client_id, lease.node) == ("l", "u", "client-u", "d@host")
    assert (lease.state, lease.age_ms, lease.blocks, lease.attempt) == ("ACTIVE", 250, 2, 1)
    assert (answer.queued, answer.waiting_for_grant) == (1, 1)


@pytest.mark.parametrize(("passed", "moved"), [(250, 250), (1_000, 1_000), (60_000, 1_000), (-60_000, 0)])
@pytest.mark.parametrize("command", [Heartbeat("p", Gauges()), Scan(0)], ids=["heartbeat", "scan"])
def test_ledger_time_moves_by_at_most_a_second_and_never_back(
    world: World, command: Any, passed: int, moved: int
) -> None:
    before = world.do(Cluster()).time_ms
    world.clock_was(passed)
    after = world.ledger.execute(command).time_ms
    assert moved <= after - before <= min(moved + 200, 1_000)


def test_after_a_step_the_clock_goes_on_from_where_it_is(world: World) -> None:
    world.clock_was(-60_000)
    first = world.ledger.execute(Scan(0)).time_ms
    world.clock_was(500)
    assert 500 <= world.ledger.execute(Scan(0)).time_ms - first <= 700


def test_other_commands_do_not_move_ledger_time(world: World) -> None:
    before = world.do(Cluster()).time_ms
    world.clock_was(700)
    info = NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h")
    assert world.ledger.execute(Register(info, 1000)).time_ms == before
    assert world.ledger.execute(ReportExit("w")).time_ms == before


def test_holdings_say_of_a_claim_whether_an_older_request_waits(world: World) -> None:
    world.cluster()
    world.admit("first")
    world.admit("second")
    world.claim("f2", "second")
    (claim,) = world.do(Holdings("p")).claims
    assert (claim.uid, claim.older_waits) == ("second", True)
    world.claim("f1", "first")
    world.admit("third")
    assert {claim.uid: claim.older_waits for claim in world.do(Holdings("p")).claims} == {
        "first": False,
        "second": False,
    }
