"""attach, detach and grace: who watches a request, and what becomes of it when nobody does."""

from __future__ import annotations

import pytest

from app.protocol.commands import AbortStatus, AttachStatus
from tests.contract.ledger.support import World

pytestmark = pytest.mark.usefixtures("cluster")


def test_attach_adds_a_watcher_and_reads_the_record_from_the_start(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, 9, node="d")
    answer = world.attach("u")
    assert answer.status is AttachStatus.ATTACHED
    assert answer.record == world.read("u")
    assert answer.record.output_ids == (7, 8, 9)
    assert world.owned("w") == {"w:u:connection-u", "w:u:other"}


def test_whoever_attached_is_told_what_comes_next(world: World) -> None:
    world.node("w2", "web")
    world.decoding()
    world.attach("u", web="w2")
    world.emit("u", 1, 8, node="d", end="stop")
    (event,) = world.events("w2")
    assert (event.index, event.tokens, event.state) == (1, (8,), "FINISHED")
    assert world.owned("w2") == set()


def test_attaching_again_changes_nothing(world: World) -> None:
    world.admit("u")
    assert world.attach("u") == world.attach("u")
    world.detach("u", "other")
    assert world.owned("w") == {"w:u:connection-u"}


def test_an_ended_request_is_read_and_not_watched(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, node="d", end="stop")
    answer = world.attach("u", web="nobody")
    assert (answer.status, answer.record) == (AttachStatus.ENDED, world.read("u"))
    assert world.owned("w") == set()


def test_there_is_nothing_to_attach_to_where_nothing_is_known(world: World) -> None:
    answer = world.attach("nobody")
    assert (answer.status, answer.record) == (AttachStatus.UNKNOWN, None)
    assert world.admit("nobody").status == "ADMITTED"  # it leaves no tombstone


@pytest.mark.parametrize("web", ["nobody", "silent"])
def test_a_web_process_that_is_not_alive_may_not_attach(world: World, web: str) -> None:
    world.node("silent", "web", ttl=10)
    world.admit("u")
    world.advance(11)
    answer = world.attach("u", web=web)
    assert (answer.status, answer.record) == (AttachStatus.REFUSED, None)
    assert world.detach("u").status is AbortStatus.ABORTED


def test_while_another_watches_nothing_is_aborted(world: World) -> None:
    world.admit("u")
    world.attach("u")
    assert world.detach("u").status is AbortStatus.WATCHED
    assert world.detach("u", "other").status is AbortStatus.ABORTED


def test_an_unwatched_request_goes_on_for_its_grace(world: World) -> None:
    world.decoding(grace_ms=30_000)
    answer = world.detach("u")
    assert (answer.status, answer.state) == (AbortStatus.GRACE, "DECODING")
    assert world.emit("u", 1, 8, node="d").status == "OK"
    world.advance(29_999)
    world.scan()
    assert world.state() == "DECODING"
    world.advance(1)
    world.scan()
    assert (world.state(), world.read("u").error_code) == ("ABORTED", "client_gone")
    assert (world.lease_state(), world.dump()["unwatched"]) == ("RELEASED", {})


def test_the_same_detach_again_does_not_lengthen_the_grace(world: World) -> None:
    world.admit("u", grace_ms=30_000)
    for _ in range(3):
        assert world.detach("u").status is AbortStatus.GRACE
        world.advance(10_000)
    world.scan()
    assert world.state() == "ABORTED"


def test_who_attaches_in_the_grace_saves_it(world: World) -> None:
    world.decoding(grace_ms=30_000)
    world.detach("u")
    world.advance(29_999)
    answer = world.attach("u")
    assert (answer.status, answer.record and answer.record.state) == (AttachStatus.ATTACHED, "DECODING")
    world.advance(60_000)
    world.scan()
    assert world.state() == "DECODING"
    assert world.detach("u", "other").status is AbortStatus.GRACE
    assert list(world.dump()["unwatched"].values()) == [answer.time_ms + 60_000 + 30_000]


@pytest.mark.parametrize("end", ["finish", "abort", "fail", "expire"])
def test_one_that_ends_in_its_grace_is_not_waited_for(world: World, end: str) -> None:
    world.prefilling(grace_ms=600_000, max_attempts=1)
    world.detach("u")
    if end == "finish":
        world.emit("u", 0, 7, end="stop")
    elif end == "abort":
        world.abort()
    elif end == "fail":
        world.fail("u")
    else:
        world.advance(300_000)
        world.scan()
    assert world.dump()["unwatched"] == {}


def test_a_requeue_does_not_end_the_grace(world: World) -> None:
    world.prefilling(grace_ms=30_000)
    world.detach("u")
    world.fail("u")
    world.advance(30_000)
    assert world.scan().bells == ()  # nobody is rung for what is aborted in the same scan
    assert world.state() == "ABORTED"


def test_the_loss_of_a_web_process_begins_the_grace_too(world: World) -> None:
    world.node("w2", "web")
    world.decoding(web="w2", grace_ms=30_000)
    world.exit("w2")
    assert world.state() == "DECODING"
    assert world.attach("u").status is AttachStatus.ATTACHED


def test_the_loss_of_a_web_process_is_told_from_a_client_that_went(world: World) -> None:
    world.node("w2", "web")
    world.admit("u", web="w2")
    world.admit("v", web="w2")
    world.attach("v")
    world.exit("w2")
    assert (world.state("u"), world.read("u").error_code) == ("ABORTED", "web_lost")
    assert world.state("v") == "QUEUED"
    world.detach("v", "other")
    assert world.read("v").error_code == "client_gone"


def test_more_unwatched_than_one_scan_may_abort_are_left_for_the_next(world: World) -> None:
    for i in range(130):
        world.admit(f"u{i}", max_queued=1000, grace_ms=10)
        world.detach(f"u{i}")
    world.advance(10)
    assert [world.scan().more, world.scan().more] == [True, False]
    assert world.dump()["unwatched"] == {}
