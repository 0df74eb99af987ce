"""scan: what expired, what lost its node, what has to be rung for again."""

from __future__ import annotations

import pytest

from app.protocol.commands import Bell
from tests.contract.ledger.support import World

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_young_last_scan_makes_the_next_one_do_nothing(world: World) -> None:
    assert world.scan(2_000).ran
    world.advance(1_999)
    assert not world.scan(2_000).ran
    world.advance(1)
    assert world.scan(2_000).ran


def test_a_request_queued_for_too_long_expires(world: World) -> None:
    world.admit("u", queue_timeout_ms=5_000)
    world.advance(4_999)
    assert world.scan().expired == ()
    world.advance(1)
    assert world.scan().expired == ("u",)
    read = world.read("u")
    assert (read.state, read.error_code) == ("EXPIRED", "queue_timeout")
    assert world.events()[-1].state == "EXPIRED"
    assert world.scan().expired == ()


def test_only_the_time_in_the_queue_counts_and_it_adds_up(world: World) -> None:
    world.admit("u", queue_timeout_ms=5_000)
    world.advance(3_000)
    world.claim("f")
    world.advance(4_000)
    world.fail("u")
    world.advance(1_999)
    assert world.scan().expired == ()
    world.advance(1)
    assert world.scan().expired == ("u",)


def test_a_first_token_that_never_comes_releases_the_lease_and_fails_the_attempt(world: World) -> None:
    world.prefilling(first_token_timeout_ms=300_000)
    world.reserve("l")
    world.advance(299_999)
    assert world.scan().expired == ()
    world.advance(1)
    answer = world.scan()
    assert (answer.expired, answer.bells) == (("u",), (Bell("prefill", "u", 2),))
    assert (world.state(), world.lease_state(), world.read("u").failures) == ("QUEUED", "EXPIRED", 1)
    assert world.owned("p") == world.owned("d") == set()


def test_the_last_attempt_without_a_first_token_fails_with_that_reason(world: World) -> None:
    world.prefilling(first_token_timeout_ms=1_000, max_attempts=1)
    world.reserve("l")
    world.advance(1_000)
    world.scan()
    assert (world.state(), world.read("u").error_code) == ("FAILED", "first_token_timeout")


def test_what_no_decode_node_takes_waits_no_longer_than_for_one_first_token(world: World) -> None:
    world.prefilling(first_token_timeout_ms=300_000)
    world.advance(300_000)
    answer = world.scan()
    read = world.read("u")
    assert (answer.expired, answer.bells) == (("u",), ())
    assert (read.state, read.error_code, read.failures) == ("EXPIRED", "first_token_timeout", 0)
    assert world.owned("p") == set()


def test_a_silent_prefill_node_loses_what_it_owns(world: World) -> None:
    world.node("p2", "prefill", ttl=5_000)
    world.admit("u")
    world.claim("f", node="p2")
    world.reserve("l")
    world.advance(5_000)
    assert world.scan().dead == ()
    world.advance(1)
    answer = world.scan()
    assert (answer.dead, answer.recovered, answer.bells) == (("p2",), ("u",), (Bell("prefill", "u", 2),))
    assert (world.state(), world.lease_state()) == ("QUEUED", "CANCELLED")
    assert "p2" not in world.dump()["nodes"]


def test_a_silent_decode_node_loses_its_requests_and_its_leases(world: World) -> None:
    world.node("d2", "decode", ttl=5_000)
    world.prefilling("u", "f", max_attempts=1)
    world.prefilling("v", "g")
    world.reserve("l", "u", node="d2")
    world.reserve("l2", "v", node="d2")
    world.activate("u", node="d2")
    world.advance(5_001)
    assert set(world.scan().recovered) == {"u", "v"}
    read = world.read("u")
    assert (read.state, read.error_code, read.error_detail) == ("FAILED", "node_lost", "d2@host")
    assert (world.state("v"), world.lease_state("l"), world.lease_state("l2")) == ("QUEUED", "RELEASED", "CANCELLED")


def test_a_silent_web_process_takes_its_requests_along(world: World) -> None:
    world.node("w2", "web", ttl=5_000)
    world.decoding("u", web="w2")
    world.advance(5_001)
    answer = world.scan()
    assert (answer.dead, answer.recovered) == (("w2",), ())
    assert (world.state(), world.read("u").error_code) == ("ABORTED", "web_lost")
    assert world.events("w2") == []


def test_more_than_one_call_may_do_is_left_for_the_next(world: World) -> None:
    for i in range(130):
        world.admit(f"u{i}", queue_timeout_ms=1_000, max_queued=1000)
    world.advance(1_000)
    first, second = world.scan(), world.scan()
    assert (len(first.expired), first.more) == (128, True)
    assert (len(second.expired), second.more) == (2, False)


def test_an_unclaimed_request_is_rung_for_after_1_2_4_8_and_8_seconds(world: World) -> None:
    world.admit("u", queue_timeout_ms=60_000)
    rung, at = [], 0
    for _ in range(64):
        if world.scan().bells:
            rung.append(at)
        world.advance(500)
        at += 500
    assert rung == [1_000, 3_000, 7_000, 15_000, 23_000, 31_000]


def test_a_claimed_request_is_not_rung_for(world: World) -> None:
    world.prefilling()
    world.advance(10_000)
    assert world.scan().bells == ()


def test_a_requeued_request_is_rung_for_at_once_and_from_the_shortest_pause(world: World) -> None:
    world.admit("u")
    world.advance(1_000)
    world.scan()
    world.claim("f")
    world.fail("u")
    assert world.scan().bells == (Bell("prefill", "u", 2),)
    world.advance(1_000)
    assert world.scan().bells == (Bell("prefill", "u", 2),)
