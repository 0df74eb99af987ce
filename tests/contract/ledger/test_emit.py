"""emit: tokens in order, once, by the owner; and the end in the same step."""

from __future__ import annotations

from typing import Any

import pytest

from app.protocol.commands import EmitStatus
from tests.contract.ledger.support import World

pytestmark = pytest.mark.usefixtures("cluster")


def test_tokens_are_appended_and_told_with_their_index(world: World) -> None:
    world.decoding()
    answer = world.emit("u", 1, 8, 9, node="d")
    assert (answer.status, answer.length) == (EmitStatus.OK, 3)
    assert [(event.index, event.tokens, event.state) for event in world.events()] == [(0, (7,), ""), (1, (8, 9), "")]


def test_the_same_tokens_again_are_written_once(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, 9, node="d")
    answer = world.emit("u", 1, 8, 9, node="d")
    assert (answer.status, answer.length) == (EmitStatus.SAME, 3)
    assert world.emit("u", 0, 7, 8, node="d").status is EmitStatus.SAME
    assert len(world.events()) == 2


def test_a_partial_repeat_appends_the_rest(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, node="d")
    assert world.emit("u", 0, 7, 8, 9, 10, node="d").length == 4
    assert world.read("u").output_ids == (7, 8, 9, 10)
    assert world.events()[-1].index == 2


def test_a_gap_says_from_where_to_send_again(world: World) -> None:
    world.decoding()
    answer = world.emit("u", 3, 10, node="d")
    assert (answer.status, answer.length) == (EmitStatus.GAP, 1)
    assert world.read("u").output_ids == (7,)


@pytest.mark.parametrize("tokens", [(9,), (9, 10), (8, 10)])
def test_other_tokens_are_refused(world: World, tokens: tuple[int, ...]) -> None:
    world.decoding()
    world.emit("u", 1, 8, 9, node="d")
    answer = world.emit("u", 1, *tokens, node="d")
    assert (answer.status, answer.length) == (EmitStatus.DIFFERENT, 3)
    assert world.read("u").output_ids == (7, 8, 9)


def test_an_end_before_what_is_there_is_refused(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, 9, node="d")
    assert world.emit("u", 1, 8, node="d", end="stop").status is EmitStatus.DIFFERENT
    assert world.state() == "DECODING"


@pytest.mark.parametrize("wrong", [{"fence": "other"}, {"attempt": 2}, {"node": "p"}], ids=str)
def test_only_the_owner_with_the_fence_may_emit(world: World, wrong: dict[str, Any]) -> None:
    world.decoding()
    assert world.emit("u", 1, 8, **({"node": "d"} | wrong)).status is EmitStatus.FENCED
    assert world.read("u").output_ids == (7,)


def test_a_zombie_of_an_earlier_attempt_is_fenced(world: World) -> None:
    world.decoding()
    world.fail("u", node="d", lease="l")
    assert world.emit("u", 1, 8, node="d").status is EmitStatus.FENCED
    world.claim("g")
    assert world.emit("u", 1, 8, node="d").status is EmitStatus.FENCED
    assert world.emit("nobody", 0, 8).status is EmitStatus.FENCED


def test_the_last_token_and_the_end_are_one_step(world: World) -> None:
    world.decoding()
    assert world.emit("u", 1, 8, node="d", end="stop").status is EmitStatus.OK
    read = world.read("u")
    assert (read.state, read.finish_reason, read.output_ids) == ("FINISHED", "stop", (7, 8))
    assert (world.lease_state(), world.owned("d"), world.owned("w")) == ("RELEASED", set(), set())
    event = world.events()[-1]
    assert (event.index, event.tokens, event.state, event.finish_reason) == (1, (8,), "FINISHED", "stop")
    assert world.admit("v", "client-u").status == "ADMITTED"


def test_the_last_emission_again_is_recognised(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, 9, node="d", end="stop")
    assert world.emit("u", 1, 8, 9, node="d", end="stop").status is EmitStatus.SAME
    assert world.emit("u", 0, 7, node="d").status is EmitStatus.SAME
    assert world.emit("u", 1, 8, 9, node="d", end="length").status is EmitStatus.FENCED
    assert world.emit("u", 1, 8, 10, node="d", end="stop").status is EmitStatus.FENCED
    assert world.emit("u", 1, 8, 9, 10, node="d").status is EmitStatus.FENCED
    assert world.emit("u", 1, 8, 9, node="d", end="stop", fence="other").status is EmitStatus.FENCED


def test_a_first_token_that_ends_the_answer_needs_no_decode_node(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    assert world.emit("u", 0, 7, end="stop").status is EmitStatus.OK
    assert (world.state(), world.lease_state(), world.owned("p")) == ("FINISHED", "CANCELLED", set())


def test_an_answer_that_was_complete_already_can_be_ended_without_tokens(world: World) -> None:
    world.decoding()
    world.fail("u", node="d", lease="l")
    world.claim("g")
    assert world.emit("u", 1, fence="g", attempt=2, end="length").status is EmitStatus.OK
    assert (world.read("u").finish_reason, world.read("u").output_ids) == ("length", (7,))


def test_an_aborted_request_says_so(world: World) -> None:
    world.decoding()
    world.abort()
    assert world.emit("u", 1, 8, node="d").status is EmitStatus.ABORTED


def test_a_request_that_failed_meanwhile_is_fenced(world: World) -> None:
    world.decoding(max_attempts=1)
    world.fail("u", node="d", lease="l")
    assert world.emit("u", 1, 8, node="d", end="stop").status is EmitStatus.FENCED


def test_thousands_of_tokens_come_through_in_one_call(world: World) -> None:
    world.node("p", "prefill", num_blocks=1_000)
    world.node("d", "decode", num_blocks=1_000)
    world.decoding(max_tokens=10_000)
    tokens = tuple(range(49_152, 49_152 + 5_000))
    assert world.emit("u", 1, *tokens, node="d").length == 5_001
    assert world.emit("u", 1, *tokens, node="d").status is EmitStatus.SAME
    assert world.read("u").output_ids == (7, *tokens)
    assert world.events()[-1].tokens == tokens


def test_logprobs_come_once_with_their_tokens(world: World) -> None:
    world.prefilling(logprobs=1)
    world.reserve("l")
    world.emit("u", 0, 7, logprobs=("-1;7:-1",))
    world.activate("u")
    assert world.emit("u", 0, 7, 8, node="d", logprobs=("-1.1", "-2")).status is EmitStatus.OK
    assert world.emit("u", 0, 7, 8, node="d", logprobs=("-1.2", "-2.2")).status is EmitStatus.SAME
    assert world.emit("u", 1, 8, 9, node="d", end="length", logprobs=("-2.3", "-3")).length == 3
    record = world.read("u")
    assert (record.output_ids, record.logprobs) == ((7, 8, 9), ("-1;7:-1", "-2", "-3"))
    assert world.read("u", from_index=1).logprobs == ("-2", "-3")
    assert [(event.index, event.tokens, event.logprobs) for event in world.events()] == [
        (0, (7,), ("-1;7:-1",)),
        (1, (8,), ("-2",)),
        (2, (9,), ("-3",)),
    ]
    ended = world.attach("u").record
    assert ended is not None
    assert ended.logprobs == record.logprobs


def test_the_next_attempt_goes_on_after_the_logprobs_that_are_there(world: World) -> None:
    world.prefilling(logprobs=0)
    world.reserve("l")
    world.emit("u", 0, 7, logprobs=("-1",))
    world.activate("u")
    world.emit("u", 1, 8, node="d", logprobs=("-2",))
    world.fail("u", node="d")
    world.work("g", "u")
    world.reserve("l2", "u")
    world.activate("u", 9, index=2, fence="g", lease="l2", attempt=2, logprobs="-3")  # its emission was lost
    assert world.read("u").logprobs == ("-1", "-2", "-3")
    assert world.events()[-1].logprobs == ("-3",)


def test_a_request_without_logprobs_keeps_nothing_of_the_kind(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, node="d", end="stop")
    assert world.read("u").logprobs == ()
    assert all(event.logprobs == () for event in world.events())
    assert world.dump()["records"]["u"]["logprobs"] == []


def test_long_logprobs_of_many_tokens_are_kept(world: World) -> None:
    world.prefilling(logprobs=20, max_tokens=1590, prompt=2)
    tokens = tuple(range(1500))
    logprobs = tuple(f"-{token}.123456;" + ",".join(f"{i}:-1.123456" for i in range(20)) for token in tokens)
    assert world.emit("u", 0, *tokens, logprobs=logprobs).length == 1500
    assert world.read("u").logprobs == logprobs
