"""claim and fail_attempt."""

from __future__ import annotations

from typing import Any

import pytest

from app.protocol.commands import ClaimStatus, Drain, FailStatus, FailureKind, ReserveStatus
from tests.contract.ledger.support import World

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_claim_gives_everything_needed_to_compute(world: World) -> None:
    world.admit("u", prompt=20, max_tokens=12)
    work = world.work("f")
    assert (work.uid, work.client_id, work.attempt, work.fence) == ("u", "client-u", 1, "f")
    assert (work.prompt_ids, work.output_ids) == (tuple(range(20)), ())
    assert (work.sampling.seed, work.sampling.stop, work.sampling.max_tokens) == (2**62 + 1, ("\n", "é"), 12)
    assert (world.state(), world.owned("p")) == ("PREFILLING", {"c:u"})
    assert set(world.read("u").timeline) == {"queued", "claimed"}


def test_an_empty_queue_has_nothing(world: World) -> None:
    assert world.claim("f", "gone").status is ClaimStatus.NOTHING


def test_the_hint_is_taken_while_nobody_before_it_has_waited_long(world: World) -> None:
    world.admit("old")
    world.admit("hinted")
    world.advance(2_000)
    assert world.work("f", "hinted").uid == "hinted"


def test_an_older_one_that_waited_over_two_seconds_goes_first(world: World) -> None:
    world.admit("old")
    world.advance(2_001)
    world.admit("hinted")
    assert world.work("f", "hinted").uid == "old"


def test_an_older_one_that_does_not_fit_does_not_hold_up_the_hint(world: World) -> None:
    world.admit("large", prompt=160)
    world.advance(2_000)
    world.admit("hinted", prompt=16)
    assert world.work("f", "hinted", free=1).uid == "hinted"


@pytest.mark.parametrize("hint", ["", "small"])
def test_once_the_head_has_waited_over_two_seconds_blocks_are_kept_free_for_it(world: World, hint: str) -> None:
    world.admit("large", prompt=160)
    world.advance(2_001)
    world.admit("small", prompt=16)
    assert world.claim("f1", hint, free=9).status is ClaimStatus.NOTHING
    assert world.work("f2", hint, free=10).uid == "large"
    assert world.work("f3", hint, free=1).uid == "small"


def test_only_the_head_holds_others_up_however_long_the_line(world: World) -> None:
    front = [f"front{i}" for i in range(64)]  # as many as a walk looks at
    for uid in (*front, "waits long"):
        world.admit(uid, prompt=160, max_queued=1000)
    world.advance(1_000)
    for uid in front:
        world.work(f"f-{uid}", uid)
    world.advance(1_500)
    for uid in front:  # back at their old places, and they have not waited
        world.fail(uid, fence=f"f-{uid}", kind=FailureKind.OVERLOAD)
    world.admit("small", prompt=4, max_queued=1000)
    assert world.work("f", free=1).uid == "small"


def test_a_head_that_could_never_fit_this_node_holds_nobody_up(world: World) -> None:
    world.node("tiny", "prefill", num_blocks=5)
    world.admit("large", prompt=160)
    world.advance(10_000)
    world.admit("small", prompt=4)
    assert world.work("f", node="tiny", free=5).uid == "small"


@pytest.mark.parametrize("hint", ["", "unknown", "large", "taken"])
def test_without_a_hint_that_can_be_taken_the_oldest_that_fits_is(world: World, hint: str) -> None:
    world.admit("taken", prompt=16)
    world.claim("f0", "taken")
    for uid, prompt in (("large", 33), ("first", 32), ("second", 1)):
        world.admit(uid, prompt=prompt)
    assert world.work("f", hint, free=2).uid == "first"


def test_output_counts_when_a_resumed_request_looks_for_room(world: World) -> None:
    world.decoding(prompt=15, max_tokens=100)
    world.emit("u", 1, 8, node="d")
    world.fail("u", node="d", lease="l")
    assert world.claim("g", free=1).status is ClaimStatus.NOTHING
    assert world.work("g", free=2).output_ids == (7, 8)


@pytest.mark.parametrize("free", [0, 1])
def test_a_node_without_room_gets_nothing(world: World, free: int) -> None:
    world.admit("u", prompt=17)
    assert world.claim("f", "u", free=free).status is ClaimStatus.NOTHING


def test_the_same_fence_again_answers_with_the_same_work(world: World) -> None:
    world.admit("u")
    world.admit("v")
    first = world.claim("f")
    assert world.claim("f") == first
    assert world.state("v") == "QUEUED"


def test_a_fence_whose_attempt_has_ended_claims_nothing_more(world: World) -> None:
    world.prefilling()
    world.fail("u")
    assert world.claim("f").status is ClaimStatus.NOTHING
    assert world.work("g").attempt == 2


@pytest.mark.parametrize("which", ["unknown", "silent", "dead", "draining", "decode"])
def test_only_a_living_prefill_node_may_claim(world: World, which: str) -> None:
    world.admit("u")
    node = "d" if which == "decode" else which
    if which in ("silent", "dead"):
        world.node(node, "prefill", ttl=10)
        world.advance(11)
    if which == "dead":
        world.scan()
    if which == "draining":
        world.node(node, "prefill")
        world.do(Drain(node))
    assert world.claim("f", node=node).status is ClaimStatus.REFUSED
    assert world.state() == "QUEUED"


def test_a_drained_node_still_learns_what_it_had_claimed(world: World) -> None:
    world.prefilling()
    world.do(Drain("p"))
    assert world.claim("f").status is ClaimStatus.CLAIMED


def test_one_token_to_come_needs_no_decode_node(world: World) -> None:
    world.prefilling(max_tokens=1)
    assert world.reserve("l").status is ReserveStatus.NOTHING


def test_seventy_that_do_not_fit_hide_a_small_one_for_a_round_only(world: World) -> None:
    for i in range(70):
        world.admit(f"large{i}", prompt=33)
    world.admit("small", prompt=16)
    assert world.work("f", free=2).uid == "small"


def test_two_hundred_that_do_not_fit_hide_a_small_one_for_some_rounds_only(world: World) -> None:
    for i in range(200):
        world.admit(f"large{i}", prompt=33, max_queued=1000)
    world.admit("small", prompt=16, max_queued=1000)
    got = [world.claim(f"f{i}", free=2).work for i in range(4)]
    assert [work.uid for work in got if work] == ["small"]


def test_a_new_one_far_behind_is_seen_again_after_the_walk_came_round(world: World) -> None:
    for i in range(130):
        world.admit(f"large{i}", prompt=33, max_queued=1000)
    world.claim("f0", free=2)
    world.claim("f1", free=2)
    world.admit("small", prompt=16, max_queued=1000)
    got = [world.claim(f"g{i}", free=2).work for i in range(4)]
    assert [work.uid for work in got if work] == ["small"]


def test_one_that_came_back_to_an_old_place_is_seen_after_the_walk_came_round(world: World) -> None:
    for i in range(200):
        world.admit(f"r{i}", prompt=16 if i == 100 else 33, max_queued=1000)
    world.claim("f", "r100", free=1)
    for i in range(3):
        assert world.claim(f"g{i}", free=2).status is ClaimStatus.NOTHING
    world.fail("r100")
    got = [world.claim(f"h{i}", free=2).work for i in range(4)]
    assert [work.uid for work in got if work] == ["r100"]


def test_a_requeued_one_in_front_does_not_hide_another_that_waited_long(world: World) -> None:
    world.admit("requeued")
    world.admit("waited")
    world.claim("f", "requeued")
    world.advance(2_001)
    world.fail("requeued")
    world.admit("hinted")
    assert world.work("g", "hinted").uid == "requeued"
    assert world.work("h", "hinted").uid == "waited"


def test_a_failure_requeues_as_the_next_attempt_at_the_old_place(world: World) -> None:
    world.prefilling("u")
    world.admit("later")
    answer = world.fail("u")
    assert (answer.status, answer.attempt) == (FailStatus.REQUEUED, 2)
    read = world.read("u")
    assert (read.state, read.attempt, read.failures) == ("QUEUED", 2, 1)
    assert world.owned("p") == set()
    assert world.work("g").uid == "u"


def test_failures_up_to_the_limit_fail_the_request(world: World) -> None:
    world.admit("u", max_attempts=2)
    world.claim("f1")
    assert world.fail("u", fence="f1").status is FailStatus.REQUEUED
    world.claim("f2")
    assert world.fail("u", fence="f2", attempt=2, reason="pull_failed").status is FailStatus.FAILED
    read = world.read("u")
    assert (read.state, read.failures, read.error_code, read.error_detail) == ("FAILED", 2, "pull_failed", "why")
    assert world.events()[-1].error_code == "pull_failed"


def test_one_attempt_means_the_first_failure_is_the_error(world: World) -> None:
    world.prefilling(max_attempts=1)
    assert world.fail("u").status is FailStatus.FAILED
    assert world.admit("v", "client-u").status == "ADMITTED"


def test_overload_counts_no_failure(world: World) -> None:
    world.prefilling(max_attempts=1)
    answer = world.fail("u", kind=FailureKind.OVERLOAD)
    assert (answer.status, answer.attempt, world.read("u").failures) == (FailStatus.REQUEUED, 2, 0)


def test_a_final_failure_fails_at_once(world: World) -> None:
    world.prefilling()
    assert world.fail("u", kind=FailureKind.FINAL).status is FailStatus.FAILED


def test_the_same_failure_again_answers_the_same(world: World) -> None:
    world.prefilling()
    assert world.fail("u") == world.fail("u")
    world.claim("g")
    assert world.fail("u").status is FailStatus.REQUEUED
    assert world.fail("u", fence="g", attempt=2, kind=FailureKind.FINAL).status is FailStatus.FAILED
    assert world.fail("u", fence="g", attempt=2, kind=FailureKind.FINAL).status is FailStatus.FAILED
    assert world.read("u").failures == 1


def test_a_failure_ends_the_lease_too(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    world.fail("u")
    assert (world.lease_state(), world.owned("d")) == ("CANCELLED", set())
    world.claim("g")
    assert world.reserve("l2").uid == "u"


@pytest.mark.parametrize(
    "wrong",
    [{"fence": "other"}, {"attempt": 2}, {"node": "d"}, {"node": "d", "lease": "other"}, {"node": "p", "lease": "l"}],
    ids=str,
)
def test_only_who_holds_the_attempt_may_fail_it(world: World, wrong: dict[str, Any]) -> None:
    world.prefilling()
    world.reserve("l")
    assert world.fail("u", **wrong).status is FailStatus.FENCED
    assert (world.state(), world.lease_state()) == ("PREFILLING", "RESERVED")


def test_a_decode_node_may_fail_it_with_the_lease_it_holds(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    assert world.fail("u", node="d", lease="l").status is FailStatus.REQUEUED


def test_prefill_may_not_fail_what_decode_has_taken_over(world: World) -> None:
    world.decoding()
    assert world.fail("u", node="p").status is FailStatus.FENCED
    assert world.fail("u", node="p", lease="l").status is FailStatus.FENCED
    assert world.state() == "DECODING"


def test_a_failed_decode_keeps_the_tokens_for_the_next_attempt(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, 9, node="d")
    assert world.fail("u", node="d", lease="l").status is FailStatus.REQUEUED
    assert world.lease_state() == "RELEASED"
    assert world.work("g").output_ids == (7, 8, 9)


def test_an_ended_request_cannot_fail(world: World) -> None:
    world.prefilling()
    world.abort()
    assert world.fail("u").status is FailStatus.FENCED
    assert world.fail("nobody").status is FailStatus.FENCED


def test_only_time_spent_queued_counts_against_the_queue_timeout(world: World) -> None:
    world.admit("u", queue_timeout_ms=10_000)
    world.advance(4_000)
    world.claim("f")
    world.advance(50_000)
    world.fail("u")
    world.advance(5_000)
    world.scan()
    assert world.state() == "QUEUED"
    world.advance(1_000)
    world.scan()
    read = world.read("u")
    assert (read.state, read.error_code, read.error_detail) == ("EXPIRED", "queue_timeout", "engine_error: why")
