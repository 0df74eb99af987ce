"""Idempotency keys, and client ids after the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.protocol.commands import Admit, AdmitStatus, FailureKind, IdempotencyKey, ReadStatus, Watcher
from app.schemas import SamplingParams
from tests.contract.ledger.support import LIMITS, World

pytestmark = pytest.mark.usefixtures("cluster")


def finish(world: World, uid: str) -> None:
    world.work(f"f-{uid}", uid)
    assert world.emit(uid, 0, 7, fence=f"f-{uid}", end="stop").status == "OK"


def fail(world: World, uid: str) -> None:
    world.work(f"f-{uid}", uid)
    world.fail(uid, fence=f"f-{uid}")
    assert world.state(uid) == "FAILED"


def abort(world: World, uid: str) -> None:
    world.abort(uid)


def expire(world: World, uid: str) -> None:
    world.advance(60_000)
    world.scan()
    assert world.state(uid) == "EXPIRED"


def fail_of_overload(world: World, uid: str) -> None:
    for attempt in range(1, 33):
        world.work(f"f-{uid}-{attempt}", uid)
        world.fail(uid, fence=f"f-{uid}-{attempt}", attempt=attempt, kind=FailureKind.OVERLOAD)
        if world.state(uid) == "FAILED":
            return
    raise AssertionError("it goes round for ever")


End = Callable[[World, str], None]


def test_the_same_key_and_body_finds_the_request_in_process(world: World) -> None:
    world.admit("u", key="k")
    again = world.admit("v", "another id", key="k")
    assert (again.status, again.uid) == (AdmitStatus.KNOWN, "u")
    assert world.read("v").status is ReadStatus.UNKNOWN
    assert list(world.dump()["queue"]) == ["u"]


def test_the_key_is_looked_at_before_the_client_id(world: World) -> None:
    world.admit("u", "mine", key="k")
    assert world.admit("v", "mine", key="k").status is AdmitStatus.KNOWN
    assert world.admit("v", "mine").status is AdmitStatus.DUPLICATE
    assert world.admit("v", "mine", key="other").status is AdmitStatus.DUPLICATE
    assert world.admit("u", "mine", key="k").status is AdmitStatus.ADMITTED  # this call again


@pytest.mark.parametrize("end", [None, finish, fail])
def test_another_body_under_the_same_key_is_refused(world: World, end: End | None) -> None:
    world.admit("u", key="k", body="one", max_attempts=1)
    if end:
        end(world, "u")
    refused = world.admit("v", "another id", key="k", body="two")
    assert (refused.status, refused.uid) == (AdmitStatus.OTHER_BODY, "u")


@pytest.mark.parametrize("end", [finish, fail])
def test_a_request_that_was_computed_keeps_its_key(world: World, end: End) -> None:
    world.admit("u", key="k", max_attempts=1)
    end(world, "u")
    again = world.admit("v", key="k")
    assert (again.status, again.uid) == (AdmitStatus.KNOWN, "u")


@pytest.mark.parametrize("end", [abort, expire, fail_of_overload])
def test_the_key_of_one_that_was_given_up_is_free_for_any_body(world: World, end: End) -> None:
    world.admit("u", key="k", body="one", max_attempts=1)
    end(world, "u")
    assert world.admit("v", "mine", key="k", body="two").status is AdmitStatus.ADMITTED
    again = world.admit("x", key="k", body="two")
    assert (again.status, again.uid) == (AdmitStatus.KNOWN, "v")


def test_two_keys_do_not_meet(world: World) -> None:
    world.admit("u", key="k1")
    assert world.admit("v", key="k2", body="another").status is AdmitStatus.ADMITTED
    assert world.admit("x").status is AdmitStatus.ADMITTED


def test_an_empty_key_is_refused_with_its_name(world: World) -> None:
    command = Admit(
        "u", "c", (1,), SamplingParams(seed=1, max_tokens=1), Watcher("w", "x"), LIMITS, IdempotencyKey("", "")
    )
    with pytest.raises(ValueError, match=r"admit: key\.scoped"):
        world.do(command)


def test_an_admission_that_is_refused_takes_no_key(world: World) -> None:
    world.admit("u")
    assert world.admit("v", key="k", max_queued=1).status is AdmitStatus.FULL
    assert world.admit("x", key="k", body="another").status is AdmitStatus.ADMITTED


def test_a_key_goes_with_its_record(world: World) -> None:
    world.admit("u", key="k", record_ttl_ms=30)
    finish(world, "u")
    world.wait_until(lambda: world.dump()["keys"] == {})
    assert world.admit("v", "mine", key="k", body="another").status is AdmitStatus.ADMITTED


def test_the_end_of_an_old_record_does_not_take_the_key_of_the_new_one(world: World) -> None:
    world.admit("u", key="k", record_ttl_ms=30)
    world.abort("u")
    world.admit("v", "mine", key="k", record_ttl_ms=30)
    world.wait_until(lambda: world.read("u").status is ReadStatus.UNKNOWN)
    assert world.dump()["keys"] == {"k": "v"}
    assert world.admit("x", key="k").uid == "v"


def test_a_finished_client_id_is_a_duplicate_for_its_window(world: World) -> None:
    world.admit("u", "mine", dedup_window_ms=400)
    finish(world, "u")
    answer = world.admit("v", "mine")
    assert (answer.status, answer.uid) == (AdmitStatus.DUPLICATE, "u")
    world.wait_until(lambda: world.dump()["guards"] == {})
    assert world.admit("v", "mine").status is AdmitStatus.ADMITTED
    world.wait_until(lambda: world.state("v") == "QUEUED")
    assert world.dump()["guards"] == {"mine": "v"}


def test_a_finished_client_id_is_free_at_once_without_a_window(world: World) -> None:
    world.admit("u", "mine")
    finish(world, "u")
    assert world.admit("v", "mine").status is AdmitStatus.ADMITTED


@pytest.mark.parametrize("end", [fail, abort, expire])
def test_every_other_end_frees_the_client_id_at_once(world: World, end: End) -> None:
    world.admit("u", "mine", dedup_window_ms=60_000, max_attempts=1)
    end(world, "u")
    assert world.admit("v", "mine").status is AdmitStatus.ADMITTED


@pytest.mark.parametrize("end", [finish, abort])
@pytest.mark.parametrize("window_ms", [0, 1])
def test_what_names_a_later_request_stays_when_an_earlier_one_ends(world: World, end: End, window_ms: int) -> None:
    """No command leads there; data that were lost in part may."""
    world.admit("u", "mine", key="k", dedup_window_ms=window_ms, record_ttl_ms=1)
    world.admit("later", record_ttl_ms=1_000_000)
    world.point("guard", "mine", "later")
    world.point("latest", "mine", "later")
    world.point("idem", "k", "later")
    end(world, "u")
    world.wait_until(lambda: world.read("u").status is ReadStatus.UNKNOWN)
    dump = world.dump()
    named = [dump[kind].get(name) for kind, name in (("guards", "mine"), ("latest", "mine"), ("keys", "k"))]
    assert named == ["later"] * 3
