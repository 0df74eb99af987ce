"""stamp, and what a node's loss means for what it had: a failure, overload, a suspect."""

from __future__ import annotations

from typing import Any

import pytest

from app.protocol.commands import (
    AbortStatus,
    ClaimStatus,
    FailStatus,
    FailureKind,
    Holdings,
    ReserveStatus,
    StampStatus,
)
from tests.contract.ledger.support import World

pytestmark = pytest.mark.usefixtures("cluster")


def fate(world: World, uid: str = "u") -> tuple[str, int, int]:
    read = world.read(uid)
    return read.state, read.attempt, read.failures


def suspect(world: World, uid: str, *, node: str = "", tokens: int = 1) -> None:
    """Make ``uid`` a suspect with ``tokens`` of output: its decode node is lost, and gone for good."""
    node = node or f"lost-with-{uid}"
    world.node(node, "decode")
    world.admit(uid, max_tokens=100, max_attempts=2)
    world.work(f"first-{uid}", uid)
    assert world.reserve(f"lost-{uid}", uid, node=node).uid == uid
    world.emit(uid, 0, *range(7, 7 + tokens), fence=f"first-{uid}")
    assert world.activate(uid, fence=f"first-{uid}", lease=f"lost-{uid}", node=node).status == "ACTIVATED"
    world.exit(node)
    assert world.dump()["records"][uid]["suspect"] == tokens + 16


def test_what_the_lost_prefill_node_was_computing_has_failed(world: World) -> None:
    world.prefilling("u", "f")
    world.prefilling("v", "g")
    assert world.stamp("u").status is StampStatus.OK
    assert set(world.exit("p").recovered) == {"u", "v"}
    assert fate(world, "u") == ("QUEUED", 2, 1)
    assert fate(world, "v") == ("QUEUED", 2, 0)


def test_a_claim_may_stamp_at_once(world: World) -> None:
    world.admit("u")
    world.work("f", stamp=True)
    world.exit("p")
    assert fate(world) == ("QUEUED", 2, 1)


def test_what_has_left_the_step_has_not_failed(world: World) -> None:
    world.prefilling()
    world.stamp("u")
    assert world.stamp("u", in_step=False).status is StampStatus.OK
    world.exit("p")
    assert fate(world) == ("QUEUED", 2, 0)


@pytest.mark.parametrize("tokens", [(7,), ()])
def test_prefills_emission_says_that_the_step_is_over(world: World, tokens: tuple[int, ...]) -> None:
    world.prefilling()
    world.emit("u", 0, 7)
    world.stamp("u")
    world.emit("u", 0, *tokens)  # the same again, or nothing: both say SAME
    world.exit("p")
    assert fate(world) == ("QUEUED", 2, 0)


@pytest.mark.parametrize("kind", [FailureKind.FAILURE, FailureKind.OVERLOAD])
def test_every_claim_begins_without_a_stamp(world: World, kind: FailureKind) -> None:
    world.prefilling()
    world.stamp("u")
    world.fail("u", kind=kind)
    before = world.read("u").failures
    world.claim("g")
    world.exit("p")
    assert fate(world) == ("QUEUED", 3, before)


@pytest.mark.parametrize("wrong", [{"fence": "other"}, {"attempt": 2}, {"node": "d"}], ids=str)
def test_only_the_owner_with_the_fence_may_stamp(world: World, wrong: dict[str, Any]) -> None:
    world.prefilling()
    assert world.stamp("u", **wrong).status is StampStatus.FENCED
    world.exit("p")
    assert fate(world) == ("QUEUED", 2, 0)


def test_only_what_prefills_can_be_stamped(world: World) -> None:
    assert world.stamp("nobody").status is StampStatus.FENCED
    world.decoding()
    assert world.stamp("u", node="d").status is StampStatus.FENCED
    world.abort()
    assert world.stamp("u", node="d").status is StampStatus.FENCED


def test_a_refused_emission_leaves_the_stamp(world: World) -> None:
    world.prefilling()
    world.stamp("u")
    assert world.emit("u", 3, 9).status == "GAP"
    world.exit("p")
    assert fate(world) == ("QUEUED", 2, 1)


def test_all_that_decodes_on_a_lost_node_has_failed(world: World) -> None:
    world.decoding()
    world.exit("d")
    assert fate(world) == ("QUEUED", 2, 1)


def test_a_lost_decode_node_fails_nothing_that_only_had_a_lease_there(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    world.stamp("u")
    assert world.exit("d").recovered == ("u",)
    assert fate(world) == ("QUEUED", 2, 0)
    assert world.owned("p") == set()


def test_a_silent_node_counts_as_one_whose_exit_was_reported(world: World) -> None:
    world.node("p2", "prefill", ttl=10)
    for uid in ("u", "v"):
        world.admit(uid)
        world.claim(f"f-{uid}", uid, node="p2")
    world.stamp("u", fence="f-u", node="p2")
    world.advance(11)
    world.scan()
    assert (fate(world, "u"), fate(world, "v")) == (("QUEUED", 2, 1), ("QUEUED", 2, 0))


def lose_as_bystander(world: World, uid: str, attempt: int) -> None:
    node = f"p-{uid}-{attempt}"
    world.node(node, "prefill")
    world.work(node, uid, node=node)
    world.exit(node)


def test_from_the_fifth_loss_in_its_life_on_a_bystander_fails_too(world: World) -> None:
    world.admit("u")
    for attempt in range(1, 5):
        lose_as_bystander(world, "u", attempt)
        assert fate(world) == ("QUEUED", attempt + 1, 0)
    lose_as_bystander(world, "u", 5)
    assert fate(world) == ("QUEUED", 6, 1)
    assert world.dump()["records"]["u"]["suspect"] == 0
    lose_as_bystander(world, "u", 6)
    assert fate(world) == ("QUEUED", 7, 2)
    assert world.dump()["records"]["u"]["suspect"] == 16
    lose_as_bystander(world, "u", 7)
    assert fate(world) == ("FAILED", 7, 3)
    assert world.read("u").error_code == "node_lost"


def test_a_loss_that_counted_is_none_of_the_five(world: World) -> None:
    world.admit("u", max_attempts=10)
    for attempt in range(1, 5):
        lose_as_bystander(world, "u", attempt)
    world.node("p2", "prefill")
    world.work("g", "u", node="p2", stamp=True)
    world.exit("p2")
    assert (fate(world), world.dump()["records"]["u"]["losses"]) == (("QUEUED", 6, 1), 4)


def test_a_request_that_is_handed_round_without_a_token_comes_to_an_end(world: World) -> None:
    world.admit("u", max_attempts=2)
    for attempt in range(1, 32):
        world.work(f"f{attempt}", "u")
        world.fail("u", fence=f"f{attempt}", attempt=attempt, kind=FailureKind.OVERLOAD)
        assert fate(world) == ("QUEUED", attempt + 1, attempt // 31)
    world.work("f32", "u")
    assert world.fail("u", fence="f32", attempt=32, kind=FailureKind.OVERLOAD).status is FailStatus.FAILED


def test_a_token_begins_the_count_of_overloads_anew(world: World) -> None:
    world.admit("u", max_attempts=1, max_tokens=100)
    for attempt in range(1, 100):
        world.work(f"f{attempt}", "u")
        if attempt % 30 == 0:
            world.emit("u", attempt // 30 - 1, 7, fence=f"f{attempt}", attempt=attempt)
        assert world.fail("u", fence=f"f{attempt}", attempt=attempt, kind=FailureKind.OVERLOAD).status == "REQUEUED"


@pytest.mark.parametrize("how", ["claim", "lease"])
def test_a_node_gets_no_second_suspect(world: World, how: str) -> None:
    for uid in ("s1", "s2"):
        suspect(world, uid)
    world.work("f1", "s1")
    if how == "claim":
        assert world.claim("f2", "s2").status is ClaimStatus.NOTHING
        world.node("p2", "prefill")
        assert world.work("f2", "s2", node="p2").uid == "s2"
    else:
        world.node("p2", "prefill")
        world.work("f2", "s2", node="p2")
        assert world.reserve("l1", "s1").uid == "s1"
        assert world.reserve("l2", "s2").status is ReserveStatus.NOTHING
        world.node("d2", "decode")
        assert world.reserve("l2", "s2", node="d2").uid == "s2"


def test_a_suspect_shares_its_nodes_with_the_innocent_and_holds_nobody_up(world: World) -> None:
    for uid in ("s1", "s2"):
        suspect(world, uid)
    world.work("f1", "s1")
    world.advance(10_000)
    world.admit("late", max_tokens=100)
    assert world.work("f3", "late").uid == "late"
    world.node("p2", "prefill")
    world.work("f2", "s2", node="p2")
    world.reserve("l1", "s1")
    world.advance(10_000)  # s2 has waited for long, and cannot be had
    assert world.reserve("l3").uid == "late"
    assert world.reserve("l2").status is ReserveStatus.NOTHING


@pytest.mark.parametrize("end", ["emit", "fail", "abort", "finish", "expire", "exit"])
def test_the_next_suspect_may_come_when_the_first_is_gone_or_trusted_again(world: World, end: str) -> None:
    for uid in ("s1", "s2"):
        suspect(world, uid)
    world.node("d2", "decode")
    world.node("p2", "prefill")
    world.work("f1", "s1")
    world.reserve("l1", "s1")
    world.advance(1)
    world.work("f2", "s2", node="p2")
    if end == "emit":
        assert world.emit("s1", 1, *range(15), fence="f1", attempt=2).status == "OK"
        assert world.reserve("l2", "s2").status is ReserveStatus.NOTHING
        assert world.emit("s1", 16, 15, fence="f1", attempt=2).status == "OK"
        assert world.dump()["records"]["s1"]["suspect"] == 0
    elif end == "fail":
        world.fail("s1", fence="f1", attempt=2)
    elif end == "abort":
        assert world.abort("s1").status is AbortStatus.ABORTED
    elif end == "finish":
        world.emit("s1", 1, 9, fence="f1", attempt=2, end="stop")
    elif end == "expire":
        world.advance(299_999)
        assert world.scan().expired == ("s1",)
    else:
        world.exit("p")
        world.node("p", "prefill")
    assert world.dump()["suspects"] == {"p2": "s2"}
    assert world.reserve("l2", "s2").uid == "s2"


def test_a_suspect_moves_with_its_activation_and_is_trusted_after_sixteen_tokens(world: World) -> None:
    suspect(world, "s1", tokens=3)
    world.work("f1", "s1")
    world.reserve("l1", "s1")
    assert world.dump()["suspects"] == {"p": "s1", "d": "s1"}
    assert world.activate("s1", index=3, fence="f1", lease="l1", attempt=2).status == "ACTIVATED"
    assert world.dump()["suspects"] == {"d": "s1"}
    world.emit("s1", 4, *range(14), fence="f1", attempt=2, node="d")
    assert world.dump()["suspects"] == {"d": "s1"}
    world.emit("s1", 18, 1, fence="f1", attempt=2, node="d")
    assert world.dump()["suspects"] == {}


def test_the_token_that_activation_writes_counts_for_trust(world: World) -> None:
    suspect(world, "s1")
    world.work("f1", "s1")
    world.reserve("l1", "s1")
    world.emit("s1", 1, *range(15), fence="f1", attempt=2)
    assert world.activate("s1", index=16, fence="f1", lease="l1", attempt=2).status == "ACTIVATED"
    assert world.dump()["suspects"] == {}


@pytest.mark.parametrize("max_attempts", [2, 3, 4])
def test_only_the_next_failure_being_the_last_makes_it_a_suspect_from_where_it_is(
    world: World, max_attempts: int
) -> None:
    world.admit("u", max_tokens=100, max_attempts=max_attempts)
    for failures in range(1, max_attempts):
        assert world.dump()["records"]["u"]["suspect"] == 0
        world.node(f"p{failures}", "prefill")
        world.work(f"f{failures}", "u", node=f"p{failures}")
        world.emit("u", failures - 1, 7, fence=f"f{failures}", attempt=failures, node=f"p{failures}")
        world.stamp("u", fence=f"f{failures}", attempt=failures, node=f"p{failures}")
        world.exit(f"p{failures}")
        assert fate(world) == ("QUEUED", failures + 1, failures)
    assert world.dump()["records"]["u"]["suspect"] == max_attempts - 1 + 16


def test_registering_again_does_not_make_a_node_forget_its_suspect(world: World) -> None:
    for uid in ("s1", "s2"):
        suspect(world, uid)
    world.work("f1", "s1")
    world.node("p", "prefill")
    assert world.claim("f2", "s2").status is ClaimStatus.NOTHING


def test_an_overload_makes_no_suspect(world: World) -> None:
    world.prefilling()
    world.exit("p")
    assert world.dump()["records"]["u"]["suspect"] == 0


def test_nobody_need_make_room_for_a_second_suspect(world: World) -> None:
    suspect(world, "first")
    suspect(world, "second")
    world.admit("third")
    world.work("f2", "second")
    world.work("f3", "third")
    claims = {claim.uid: claim.older_waits for claim in world.do(Holdings("p")).claims}
    assert claims == {"second": False, "third": False}


def test_a_second_suspect_hides_no_older_request_behind_it(world: World) -> None:
    suspect(world, "first")
    suspect(world, "second")
    world.admit("third")
    world.admit("fourth")
    world.work("f2", "second")
    world.work("f4", "fourth")
    claims = {claim.uid: claim.older_waits for claim in world.do(Holdings("p")).claims}
    assert claims == {"second": False, "fourth": True}
