"""Nodes that just failed each other are kept apart while others exist."""

from __future__ import annotations

import pytest

from app.protocol.commands import ClaimStatus, Deregister, Drain, FailStatus, FailureKind, ReserveStatus
from app.schemas import Role
from tests.contract.ledger.support import World


@pytest.fixture(autouse=True)
def _cluster(world: World) -> None:
    world.cluster()
    world.node("d2", "decode")


def bad_pair(world: World, uid: str, times: int = 1, *, node: str = "d") -> None:
    """Let ``p`` and ``node`` fail each other, the last time now; ``uid`` is QUEUED after it, as attempt times + 1."""
    world.admit(uid, max_attempts=10, queue_timeout_ms=1_000_000)
    for attempt in range(1, times + 1):
        world.advance(10_000 if attempt > 1 else 0)
        world.work(f"bad-{uid}-{attempt}", uid, free=10_000)
        world.reserve(f"bad-{uid}-{attempt}", uid, node=node, free=10_000)
        fence = f"bad-{uid}-{attempt}"
        assert world.fail(uid, fence=fence, attempt=attempt, avoid=True).status is FailStatus.REQUEUED


def test_they_are_kept_apart_for_two_seconds(world: World) -> None:
    bad_pair(world, "u")
    world.abort("u")
    world.prefilling("v", "g")
    world.advance(2_000)
    assert world.reserve("l", "v").status is ReserveStatus.NOTHING
    world.advance(1)
    assert world.reserve("l", "v").uid == "v"


def test_another_decode_node_takes_the_work_meanwhile(world: World) -> None:
    bad_pair(world, "u")
    world.work("g", "u")
    assert world.reserve("l", "u").status is ReserveStatus.NOTHING
    assert world.reserve("l", "u", node="d2").uid == "u"


def test_the_record_keeps_away_from_that_decode_node_wherever_it_is_computed(world: World) -> None:
    world.node("p2", "prefill")
    bad_pair(world, "u")
    world.work("g", "u", node="p2")
    assert world.reserve("l", "u").status is ReserveStatus.NOTHING
    world.admit("v")
    world.work("h", "v", node="p2")
    assert world.reserve("l", "v").uid == "v"  # p2 and d have nothing against each other
    world.advance(2_001)
    assert world.reserve("l2", "u").uid == "u"


@pytest.mark.parametrize(("times", "seconds"), [(1, 2), (2, 4), (3, 8), (4, 8), (5, 8)])
def test_each_time_in_a_row_lasts_twice_as_long_up_to_8_seconds(world: World, times: int, seconds: int) -> None:
    bad_pair(world, "u", times)
    world.abort("u")
    world.prefilling("v", "g")
    world.advance(seconds * 1_000)
    assert world.reserve("l", "v").status is ReserveStatus.NOTHING
    world.advance(1)
    assert world.reserve("l", "v").uid == "v"


def test_a_failure_that_names_no_pair_keeps_nobody_apart(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    world.fail("u")
    world.work("g", "u")
    assert world.reserve("l2", "u").uid == "u"


def test_without_a_lease_or_after_activation_there_is_no_pair(world: World) -> None:
    world.prefilling()
    world.fail("u", avoid=True)
    world.decoding("v", "g", "l")
    world.fail("v", fence="g", node="d", lease="l", avoid=True)
    assert world.dump()["avoided"] == {}


def test_the_decode_nodes_word_counts_as_well(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    world.fail("u", node="d", lease="l", avoid=True)
    world.work("g", "u")
    assert world.reserve("l2", "u").status is ReserveStatus.NOTHING


def test_an_overload_or_a_final_failure_may_name_a_pair_too(world: World) -> None:
    for uid, kind in (("u", FailureKind.OVERLOAD), ("v", FailureKind.FINAL)):
        world.prefilling(uid, uid)
        world.reserve(uid, uid, node="d2")
        world.fail(uid, fence=uid, kind=kind, avoid=True)
        assert set(world.dump()["avoided"]) == {"p:d2"}
        world.abort(uid)
        world.advance(10_000)
    assert world.dump()["avoided_times"] == {"p:d2": 2}


def test_the_same_failure_again_counts_once(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    assert world.fail("u", avoid=True) == world.fail("u", avoid=True)
    assert world.dump()["avoided_times"] == {"p:d": 1}


def test_an_activation_between_the_two_makes_it_good(world: World) -> None:
    bad_pair(world, "u", 3)
    world.abort("u")
    world.advance(8_001)
    world.decoding("v", "g", "l")
    assert (world.dump()["avoided"], world.dump()["avoided_times"]) == ({}, {})
    bad_pair(world, "x")
    world.abort("x")
    world.prefilling("y", "h")
    world.advance(2_001)  # it is a first time again
    assert world.reserve("l2", "y").uid == "y"


def test_the_record_keeps_away_from_that_prefill_node_too_while_another_could_compute_it(world: World) -> None:
    """The node may be cut off from every decode node, and free at once: it would use up the request's attempts."""
    world.node("p2", "prefill")
    bad_pair(world, "u")
    world.admit("v")
    assert world.claim("g", "u").work is not None, "others are not its business"
    assert world.state("u") == "QUEUED"
    assert world.claim("h", "u").status is ClaimStatus.NOTHING
    assert world.work("i", "u", node="p2").uid == "u"


def test_the_record_may_be_computed_there_again_after_the_pairs_time(world: World) -> None:
    world.node("p2", "prefill")
    bad_pair(world, "u")
    world.advance(2_000)
    assert world.claim("g", "u").status is ClaimStatus.NOTHING
    world.advance(1)
    assert world.work("h", "u").uid == "u"


@pytest.mark.parametrize("other", ["none", "draining", "silent", "small", "decode"])
def test_without_another_prefill_node_that_could_compute_it_the_same_one_does(world: World, other: str) -> None:
    if other != "none":
        role: Role = "decode" if other == "decode" else "prefill"
        world.node("p2", role, ttl=10 if other == "silent" else 10_000_000, num_blocks=1 if other == "small" else 100)
    if other == "draining":
        world.do(Drain("p2"))
    world.advance(11)
    bad_pair(world, "u")
    assert world.work("g", "u").uid == "u"


@pytest.mark.parametrize("other", ["none", "draining", "silent", "small", "apart", "shunned", "prefill"])
def test_without_another_that_could_take_it_a_bad_pair_is_better_than_none(world: World, other: str) -> None:
    if other in ("none", "silent", "small", "prefill"):
        world.do(Deregister("d2"))
    if other == "silent":
        world.node("d2", "decode", ttl=10)
        world.advance(11)
    elif other == "small":
        world.node("d2", "decode", num_blocks=1)
    elif other == "prefill":
        world.node("d2", "prefill")
    elif other == "draining":
        world.do(Drain("d2"))
    elif other == "apart":
        bad_pair(world, "x", node="d2")
        world.abort("x")
    bad_pair(world, "u")
    if other == "shunned":
        world.abort("u")
        bad_pair(world, "v", node="d2")
        world.work("g", "v")
        world.node("p2", "prefill")
        world.admit("y")
        world.work("y", "y", node="p2")
        assert world.reserve("l", "v").uid == "v"  # its pair with d is bad, d2 is shunned
        return
    world.work("g", "u", node="d2" if other == "prefill" else "p")
    assert world.reserve("l", "u").uid == "u"


def test_one_that_is_just_large_enough_could_take_it(world: World) -> None:
    world.node("d2", "decode", num_blocks=2)  # prompt 20 and 12 tokens in blocks of 16
    bad_pair(world, "u")
    world.work("g", "u")
    assert world.reserve("l", "u").status is ReserveStatus.NOTHING


def test_a_waiter_that_is_kept_apart_holds_nobody_up(world: World) -> None:
    bad_pair(world, "u", 3)  # for 8 s
    world.work("g", "u")
    world.node("p2", "prefill")
    world.admit("v")
    world.work("h", "v", node="p2")
    world.advance(5_000)  # u stands first and has waited for long
    assert world.reserve("l").uid == "v"
    assert world.reserve("l2").status is ReserveStatus.NOTHING


def test_a_pair_is_forgotten_a_minute_after_its_time(world: World) -> None:
    bad_pair(world, "u")
    world.abort("u")
    world.advance(61_999)
    world.scan()
    assert set(world.dump()["avoided"]) == {"p:d"}
    world.advance(1)
    world.scan()
    assert (world.dump()["avoided"], world.dump()["avoided_times"]) == ({}, {})


@pytest.mark.parametrize("gone", ["p", "d"])
def test_a_pair_goes_with_either_of_its_nodes(world: World, gone: str) -> None:
    bad_pair(world, "u", node="d2")
    bad_pair(world, "v")
    world.exit(gone)
    left = {"p": set(), "d": {"p:d2"}}[gone]
    assert set(world.dump()["avoided"]) == set(world.dump()["avoided_times"]) == left
