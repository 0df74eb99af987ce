"""admit, abort, detach, snapshot."""

from __future__ import annotations

import pytest

from app.protocol.commands import (
    Abort,
    AbortStatus,
    AdmitStatus,
    ClaimStatus,
    Detach,
    EmitStatus,
    ReadStatus,
    ReserveStatus,
    Watcher,
)
from tests.contract.ledger.support import World

pytestmark = pytest.mark.usefixtures("cluster")


def test_admission_queues_a_record_that_can_be_read_by_uid_and_by_client_id(world: World) -> None:
    assert world.admit("u", "mine").status is AdmitStatus.ADMITTED
    by_uid, by_client = world.read("u"), world.read(client_id="mine")
    assert by_uid == by_client
    assert (by_uid.state, by_uid.attempt, by_uid.prompt_tokens, by_uid.output_ids) == ("QUEUED", 1, 20, ())
    assert set(by_uid.timeline) == {"queued"}


def test_a_client_id_in_process_is_refused_with_the_uid_that_holds_it(world: World) -> None:
    world.admit("u", "mine")
    second = world.admit("v", "mine")
    assert (second.status, second.uid) == (AdmitStatus.DUPLICATE, "u")
    assert world.read("v").status is ReadStatus.UNKNOWN


def test_a_client_id_is_free_again_after_the_end_and_latest_moves_on(world: World) -> None:
    world.admit("u", "mine")
    world.abort()
    assert world.admit("v", "mine").status is AdmitStatus.ADMITTED
    assert world.read(client_id="mine").uid == "v"
    assert world.read("u").state == "ABORTED"


def test_the_end_of_an_old_record_leaves_the_guard_of_the_new_one_alone(world: World) -> None:
    world.admit("u", "mine")
    world.abort()
    world.admit("v", "mine")
    world.do(Abort("u", "again"))
    assert world.admit("x", "mine").status is AdmitStatus.DUPLICATE


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "room"),
    [
        (60, 36, None),
        (60, 37, 96),  # decode holds prompt and answer
        (160, 1, None),  # prefill samples the only token itself
        (161, 1, 160),  # prefill holds the prompt
    ],
)
def test_what_no_living_node_could_ever_hold_is_refused(
    world: World, prompt: int, max_tokens: int, room: int | None
) -> None:
    world.node("p", "prefill", num_blocks=10)
    world.node("p2", "prefill", num_blocks=4)
    world.node("d", "decode", num_blocks=3)
    world.node("d2", "decode", num_blocks=6)
    answer = world.admit("u", prompt=prompt, max_tokens=max_tokens)
    if room is None:
        assert answer.status is AdmitStatus.ADMITTED
    else:
        assert (answer.status, answer.room_tokens) == (AdmitStatus.TOO_LARGE, room)
        assert world.read("u").status is ReadStatus.UNKNOWN


@pytest.mark.parametrize(("max_tokens", "status"), [(25, AdmitStatus.ADMITTED), (26, AdmitStatus.TOO_LARGE)])
def test_an_answer_that_no_prefill_node_could_read_again_is_refused(
    world: World, max_tokens: int, status: AdmitStatus
) -> None:
    world.node("p", "prefill", num_blocks=4)
    world.node("d", "decode", num_blocks=10)
    assert world.admit("u", prompt=40, max_tokens=max_tokens).status is status


def test_nothing_is_too_large_for_nodes_that_are_yet_to_come(world: World) -> None:
    world.node("d", "decode", num_blocks=3, ttl=10)
    assert world.admit("u", prompt=60).status is AdmitStatus.TOO_LARGE
    world.advance(11)  # d is silent: what comes in its place may be larger
    assert world.admit("u", prompt=60).status is AdmitStatus.ADMITTED


def test_the_same_admission_again_is_admitted_once(world: World) -> None:
    world.admit("u")
    assert world.admit("u").status is AdmitStatus.ADMITTED
    assert list(world.dump()["queue"]) == ["u"]


def test_a_full_queue_refuses_and_says_how_many_wait(world: World) -> None:
    world.admit("u", max_queued=1)
    refused = world.admit("v", max_queued=1)
    assert (refused.status, refused.queued) == (AdmitStatus.FULL, 1)
    assert world.claim("f").status is ClaimStatus.CLAIMED
    assert world.admit("v", max_queued=1).status is AdmitStatus.ADMITTED


def test_a_requeued_request_goes_back_into_a_full_queue(world: World) -> None:
    world.prefilling("u", max_queued=1)
    world.admit("v", max_queued=1)
    assert world.fail("u").status == "REQUEUED"
    assert world.admit("x", max_queued=2).status is AdmitStatus.FULL


@pytest.mark.parametrize("web", ["nobody", "silent"])
def test_a_request_watched_by_no_living_web_process_is_refused(world: World, web: str) -> None:
    world.node("silent", "web", ttl=10)
    world.advance(11)
    assert world.admit("u", web=web).status is AdmitStatus.REFUSED
    assert world.read("u").status is ReadStatus.UNKNOWN


def test_an_admission_says_when_it_was_as_the_records_timeline_does(world: World) -> None:
    first, again = world.admit("u"), world.admit("u")
    timeline = world.read("u").timeline
    assert first.admitted_wall_ms == again.admitted_wall_ms == timeline["queued"] > 0


def test_an_admission_that_comes_after_its_abort_is_refused(world: World) -> None:
    assert world.do(Abort("u", "unknown outcome")).status is AbortStatus.TOMBSTONED
    assert world.do(Abort("u", "unknown outcome")).status is AbortStatus.TOMBSTONED
    world.advance(60_000)
    world.scan()
    assert world.admit("u").status is AdmitStatus.TOMBSTONED


def test_a_tombstone_is_pruned_in_the_end(world: World) -> None:
    world.do(Detach("u", Watcher("w", "x")))
    world.advance(3_600_000)
    world.scan()
    assert world.dump()["tombstones"] == {}


def test_abort_ends_a_queued_request(world: World) -> None:
    world.admit("u")
    answer = world.abort()
    assert (answer.status, answer.state) == (AbortStatus.ABORTED, "ABORTED")
    assert world.abort().status is AbortStatus.ABORTED
    assert world.read("u").error_code == "user"
    assert world.claim("f").status is ClaimStatus.NOTHING


def test_abort_while_prefilling_cancels_the_lease_and_fences_both_nodes(world: World) -> None:
    world.prefilling()
    world.reserve("l")
    world.abort()
    assert world.lease_state() == "CANCELLED"
    assert world.owned("p") == world.owned("d") == set()
    assert world.emit("u", 0, 7).status is EmitStatus.ABORTED
    assert world.activate("u").status == "FENCED"


def test_abort_while_decoding_releases_the_lease(world: World) -> None:
    world.decoding()
    world.abort()
    assert (world.lease_state(), world.owned("d")) == ("RELEASED", set())
    assert world.emit("u", 1, 8, node="d").status is EmitStatus.ABORTED


def test_abort_of_a_waiter_takes_it_out_of_the_line(world: World) -> None:
    world.prefilling()
    world.abort()
    assert world.reserve("l").status is ReserveStatus.NOTHING


def test_abort_after_the_end_says_how_it_ended(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, node="d", end="stop")
    answer = world.abort()
    assert (answer.status, answer.state) == (AbortStatus.ENDED, "FINISHED")


def test_the_last_watcher_gone_aborts(world: World) -> None:
    world.admit("u")
    answer = world.do(Detach("u", Watcher("w", "somebody else")))
    assert (answer.status, answer.state) == (AbortStatus.WATCHED, "QUEUED")
    answer = world.do(Detach("u", Watcher("w", "connection-u")))
    assert (answer.status, answer.state) == (AbortStatus.ABORTED, "ABORTED")
    assert world.read("u").error_code == "client_gone"
    assert world.do(Detach("u", Watcher("w", "connection-u"))).status is AbortStatus.ABORTED
    assert world.owned("w") == set()


def test_detach_after_the_end_says_how_it_ended(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, node="d", end="length")
    assert world.do(Detach("u", Watcher("w", "connection-u"))).state == "FINISHED"


def test_the_terminal_event_says_why(world: World) -> None:
    world.admit("u")
    world.abort()
    (event,) = world.events()
    assert (event.uid, event.state, event.error_code, event.tokens) == ("u", "ABORTED", "user", ())


def test_an_ended_record_goes_away_after_its_ttl_and_a_running_one_does_not(world: World) -> None:
    world.admit("u", record_ttl_ms=30)
    world.admit("v", record_ttl_ms=30)
    world.abort()
    world.wait_until(lambda: world.read("u").status is ReadStatus.UNKNOWN)
    assert world.read(client_id="client-u").status is ReadStatus.UNKNOWN
    assert world.state("v") == "QUEUED"


def test_a_snapshot_starts_where_it_is_asked_to(world: World) -> None:
    world.decoding()
    world.emit("u", 1, 8, 9, node="d")
    answer = world.read("u", from_index=2)
    assert (answer.output_from, answer.output_ids) == (2, (9,))
    assert world.read("u", from_index=9).output_ids == ()
    assert (answer.prefill_node, answer.decode_node) == ("p@host", "d@host")


def test_nothing_is_known_of_an_unknown_id(world: World) -> None:
    assert world.read("nobody").status is ReadStatus.UNKNOWN
    assert world.read(client_id="nobody").status is ReadStatus.UNKNOWN


@pytest.mark.parametrize("uid", ["a:b", ""])
def test_new_ids_that_would_be_ambiguous_are_refused_with_their_name(world: World, uid: str) -> None:
    with pytest.raises(ValueError, match="admit: uid"):
        world.admit(uid)
    with pytest.raises(ValueError, match=r"register: node\.incarnation"):
        world.node(uid, "web")


def test_ids_that_clients_make_up_are_just_unknown(world: World) -> None:
    assert world.read("a:b").status is ReadStatus.UNKNOWN
    assert world.read(client_id="a:b{0}\n").status is ReadStatus.UNKNOWN
    assert world.admit("u", "a:b{0}\n\u00e9").status is AdmitStatus.ADMITTED
    assert world.read(client_id="a:b{0}\n\u00e9").uid == "u"
