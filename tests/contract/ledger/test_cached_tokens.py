"""What of a prompt was not computed is kept with the first token; and the salt of a request reaches who computes it."""

from __future__ import annotations

import pytest

from tests.contract.ledger.support import World

pytestmark = pytest.mark.usefixtures("cluster")


def test_the_salt_reaches_prefill_and_decode_and_every_attempt(world: World) -> None:
    world.admit("u", salt="tenant")
    assert world.work("f", "u").salt == "tenant"
    world.reserve("l", "u")
    activated = world.activate("u")
    assert activated.work is not None and activated.work.salt == "tenant"
    world.fail("u", node="d", lease="l")
    assert world.work("f2", "u").salt == "tenant"


def test_a_request_without_a_salt_has_an_empty_one(world: World) -> None:
    world.admit("u")
    assert world.work("f", "u").salt == ""


def test_cached_tokens_come_with_the_first_token_in_record_and_event(world: World) -> None:
    world.prefilling()
    assert world.read("u").cached_tokens == 0
    world.emit("u", 0, 7, cached=16)
    assert world.read("u").cached_tokens == 16
    (event,) = world.events()
    assert (event.index, event.cached_tokens) == (0, 16)


def test_the_first_token_carries_them_and_the_end_again(world: World) -> None:
    world.prefilling()
    world.reserve("l", "u")
    world.emit("u", 0, 7, cached=16)
    world.activate("u", cached_tokens=32)
    world.emit("u", 1, 8, node="d", cached=32)
    world.emit("u", 2, 9, node="d", cached=32)
    world.emit("u", 3, 9, node="d", end="stop", cached=32)
    assert world.read("u").cached_tokens == 16
    assert [event.cached_tokens for event in world.events()] == [16, 0, 0, 16]


def test_an_answer_that_ends_with_its_first_token_has_them_in_its_last_event(world: World) -> None:
    world.prefilling()
    world.emit("u", 0, 7, end="stop", cached=16)
    (event,) = world.events()
    assert (event.state, event.cached_tokens) == ("FINISHED", 16)
    assert world.read("u").cached_tokens == 16


def test_activation_brings_them_where_the_ledger_lost_the_first_token(world: World) -> None:
    world.prefilling()
    world.reserve("l", "u")
    world.activate("u", cached_tokens=16)
    assert world.read("u").cached_tokens == 16
    assert [event.cached_tokens for event in world.events()] == [16]


def test_a_resumed_attempt_changes_nothing_of_them(world: World) -> None:
    world.prefilling()
    world.emit("u", 0, 7, cached=0)
    world.fail("u")
    world.claim("f2", "u")
    world.emit("u", 1, 8, fence="f2", attempt=2, cached=16)
    assert world.read("u").cached_tokens == 0


def test_they_are_those_of_the_attempt_that_drew_the_first_token(world: World) -> None:
    world.prefilling()
    world.fail("u")
    world.claim("f2", "u")
    world.emit("u", 0, 7, fence="f2", attempt=2, cached=16)
    assert world.read("u").cached_tokens == 16
    assert world.read("u", from_index=1).cached_tokens == 16
