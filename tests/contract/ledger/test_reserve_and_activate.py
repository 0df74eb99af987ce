"""reserve_next and activate."""

from __future__ import annotations

from typing import Any

import pytest

from app.protocol.commands import ActivateStatus, ClaimStatus, Cluster, Drain, FailureKind, ReserveStatus
from tests.contract.ledger.support import World

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_reservation_names_the_attempt_and_the_prefill_node(world: World) -> None:
    world.prefilling(prompt=20, max_tokens=13)
    answer = world.reserve("l")
    assert answer.status is ReserveStatus.RESERVED
    assert (answer.uid, answer.client_id, answer.attempt, answer.fence) == ("u", "client-u", 1, "f")
    assert (answer.blocks, answer.prefill_incarnation, answer.prefill_address) == (3, "p", "tcp://p")
    assert (world.lease_state(), world.owned("d")) == ("RESERVED", {"l:l"})


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "starts_with", "most"),
    [(20, 500, 3, 33), (16, 500, 2, 33), (17, 2, 2, 2), (32, 16, 3, 3)],
    ids=["two and one more", "full blocks", "no more than the whole answer", "exactly the whole answer"],
)
def test_a_lease_starts_with_what_the_prompt_needs_and_one_block_more(
    world: World, prompt: int, max_tokens: int, starts_with: int, most: int
) -> None:
    world.prefilling(prompt=prompt, max_tokens=max_tokens)
    assert world.reserve("small", free=starts_with - 1).status is ReserveStatus.NOTHING
    answer = world.reserve("l", free=starts_with)
    assert (answer.blocks, answer.most_blocks) == (starts_with, most)


def test_a_resumed_request_has_a_lease_for_its_output_too(world: World) -> None:
    world.decoding(prompt=20, max_tokens=500)
    world.emit("u", 1, *range(100, 130), node="d")  # 51 tokens
    world.fail("u", node="d", lease="l", kind=FailureKind.OVERLOAD)
    assert world.claim("g").status is ClaimStatus.CLAIMED
    again = world.reserve("l2")
    assert (again.attempt, again.blocks, again.most_blocks) == (2, 5, 33)


def test_a_node_that_could_not_hold_the_whole_answer_gets_no_lease(world: World) -> None:
    world.node("tiny", "decode", num_blocks=5)
    world.prefilling(prompt=16, max_tokens=100)  # eight blocks at its end, two at its beginning
    assert world.reserve("l", node="tiny", free=5).status is ReserveStatus.NOTHING
    assert world.reserve("l", free=2).status is ReserveStatus.RESERVED


def test_a_reservation_says_who_is_older(world: World) -> None:
    world.prefilling("old", "f")
    world.prefilling("young", "g")
    young, old = world.reserve("l1", "young"), world.reserve("l2", "old")
    assert (young.uid, old.uid) == ("young", "old")
    assert old.seq < young.seq


def test_the_hint_does_not_pass_an_older_request_that_was_handed_back(world: World) -> None:
    world.decoding("old")
    world.fail("old", node="d", lease="l", kind=FailureKind.OVERLOAD)
    assert world.claim("g", "old").status is ClaimStatus.CLAIMED
    world.prefilling("young", "h")
    assert world.reserve("l2", "young").uid == "old"


def test_the_ledger_knows_how_far_a_lease_has_grown(world: World) -> None:
    world.decoding(prompt=20, max_tokens=500)

    def blocks() -> list[int]:
        return [lease.blocks for lease in world.do(Cluster()).leases]

    assert blocks() == [3]
    world.emit("u", 1, 8, node="d", blocks=4)
    assert blocks() == [4]
    world.emit("u", 2, 9, node="d")
    assert blocks() == [4]
    world.emit("u", 3, 9, node="other", blocks=5)
    assert blocks() == [4]


def test_one_lease_per_attempt(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    assert world.reserve("l2").status is ReserveStatus.NOTHING
    assert world.reserve("l3", "u").status is ReserveStatus.NOTHING


def test_the_same_lease_id_again_answers_with_the_same_lease(world: World) -> None:
    world.prefilling("u", "f")
    world.prefilling("v", "g")
    assert world.reserve("l") == world.reserve("l")
    assert len(world.dump()["leases"]) == 1


def test_a_closed_lease_id_reserves_nothing_more(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    world.fail("u")
    world.claim("g")
    assert world.reserve("l").status is ReserveStatus.NOTHING


def test_a_lease_id_of_another_node_is_not_ours(world: World) -> None:
    world.node("d2", "decode")
    world.prefilling()
    world.reserve("l")
    assert world.reserve("l", node="d2").status is ReserveStatus.NOTHING


def test_the_oldest_that_fits_or_the_hint(world: World) -> None:
    for uid, prompt in (("large", 200), ("old", 20), ("hinted", 20)):
        world.prefilling(uid, f"f-{uid}", prompt=prompt)
    assert world.reserve("l1", "hinted", free=2).uid == "hinted"
    assert world.reserve("l2", "large", free=2).uid == "old"
    assert world.reserve("l3", free=2).status is ReserveStatus.NOTHING


def test_nothing_passes_a_head_that_has_waited_two_seconds(world: World) -> None:
    world.prefilling("large", "f1", prompt=160)
    world.advance(2_000)
    world.prefilling("small", "f2", prompt=4)
    assert world.reserve("l", "small", free=1).status is ReserveStatus.NOTHING
    assert world.reserve("l", "small", free=100).uid == "large"


def test_a_head_that_could_never_fit_this_node_holds_nobody_up(world: World) -> None:
    world.node("tiny", "decode", num_blocks=5)
    world.prefilling("large", "f1", prompt=160)
    world.advance(10_000)
    world.prefilling("small", "f2", prompt=4)
    assert world.reserve("l", node="tiny", free=5).uid == "small"


@pytest.mark.parametrize("which", ["unknown", "silent", "draining", "prefill"])
def test_only_a_living_decode_node_may_reserve(world: World, which: str) -> None:
    world.prefilling()
    node = "p" if which == "prefill" else which
    if which in ("silent", "draining"):
        world.node(node, "decode", ttl=10)
    world.advance(11 if which == "silent" else 0)
    if which == "draining":
        world.do(Drain(node))
    assert world.reserve("l", node=node).status is ReserveStatus.REFUSED


def test_many_waiters_that_do_not_fit_hide_a_small_one_for_a_round_only(world: World) -> None:
    world.node("p", "prefill", num_blocks=1_000)
    world.node("d2", "decode", num_blocks=1_000)
    for i in range(140):
        world.prefilling(f"large{i}", f"f{i}", prompt=2000, max_queued=1000)
    world.prefilling("small", "g", prompt=4)
    got = [world.reserve(f"l{i}", free=100) for i in range(4)]
    assert [answer.uid for answer in got if answer.uid] == ["small"]


def test_activation_moves_the_request_to_the_decode_node(world: World) -> None:
    world.decoding()
    assert (world.state(), world.lease_state()) == ("DECODING", "ACTIVE")
    assert (world.owned("p"), world.owned("d")) == (set(), {"c:u", "l:l"})
    assert set(world.read("u").timeline) == {"queued", "claimed", "granted", "first_token", "committed", "activated"}


def test_activation_again_answers_with_the_work(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, node="d")
    answer = world.activate("u")
    assert (answer.status, answer.work and answer.work.output_ids) == (ActivateStatus.ACTIVATED, (7, 8))


def test_activation_writes_a_token_that_the_ledger_lost(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    answer = world.activate("u", 7)
    assert (answer.status, answer.work and answer.work.output_ids) == (ActivateStatus.ACTIVATED, (7,))
    assert [(event.index, event.tokens) for event in world.events()] == [(0, (7,))]
    assert "first_token" in world.read("u").timeline


def test_activation_on_another_token_changes_nothing(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    world.emit("u", 0, 7)
    assert world.activate("u", 8).status is ActivateStatus.DIFFERENT
    assert (world.state(), world.lease_state()) == ("PREFILLING", "RESERVED")


def test_activation_past_lost_tokens_says_so(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    assert world.activate("u", 8, index=1).status is ActivateStatus.GAP
    assert world.state() == "PREFILLING"


@pytest.mark.parametrize(
    "wrong", [{"fence": "other"}, {"attempt": 2}, {"lease": "other"}, {"node": "p"}, {"node": "d2"}], ids=str
)
def test_activation_by_anybody_else_is_fenced(world: World, wrong: dict[str, Any]) -> None:
    world.node("d2", "decode")
    world.prefilling()
    world.reserve("l")
    assert world.activate("u", **wrong).status is ActivateStatus.FENCED


def test_a_draining_decode_node_may_activate_what_it_has(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    world.do(Drain("d"))
    assert world.activate("u").status is ActivateStatus.ACTIVATED


def test_a_silent_decode_node_may_not_activate(world: World) -> None:
    world.node("d2", "decode", ttl=10)
    world.prefilling()
    world.reserve("l", node="d2")
    world.advance(11)
    assert world.activate("u", node="d2").status is ActivateStatus.FENCED


def test_of_expiry_and_activation_the_first_wins(world: World) -> None:
    world.prefilling(first_token_timeout_ms=1_000)
    world.reserve("l")
    world.advance(1_000)
    world.scan()
    assert (world.state(), world.lease_state()) == ("QUEUED", "EXPIRED")
    assert world.activate("u").status is ActivateStatus.FENCED


def test_an_activated_request_has_no_first_token_deadline(world: World) -> None:
    world.decoding(first_token_timeout_ms=1_000)
    assert world.dump()["deadlines"] == {}
    world.advance(10_000)
    assert world.scan().expired == ()
    assert world.state() == "DECODING"


def test_a_resumed_attempt_is_activated_at_its_own_index(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, node="d")
    world.fail("u", node="d", lease="l")
    assert world.claim("g").status is ClaimStatus.CLAIMED
    world.reserve("l2")
    assert world.emit("u", 2, 9, fence="g", attempt=2).status == "OK"
    answer = world.activate("u", 9, index=2, fence="g", lease="l2", attempt=2)
    assert (answer.status, answer.work and answer.work.output_ids) == (ActivateStatus.ACTIVATED, (7, 8, 9))
