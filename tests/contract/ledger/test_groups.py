"""A request of several sequences is one: admitted, refused, cancelled and ended as a whole, computed one by one."""

from __future__ import annotations

from typing import Any

import pytest

from app.protocol.commands import Admit, AdmitStatus, FailureKind, Limits, Sibling, Watcher
from app.schemas import SamplingParams
from tests.contract.ledger.support import World

UIDS = ("u", "u.1", "u.2")


@pytest.fixture
def group(world: World) -> World:
    """A group of three, nothing computed yet; its client id is ``client-u``."""
    world.cluster()
    assert world.admit("u", more=(20, 5)).status == "ADMITTED"
    return world


def finish(world: World, uid: str) -> None:
    """From QUEUED to its end."""
    world.work(f"f-{uid}", uid, free=10_000)
    assert world.emit(uid, 0, 7, fence=f"f-{uid}", end="stop").status == "OK"


def states(world: World) -> list[str]:
    return [world.state(uid) for uid in UIDS]


def test_all_are_admitted_each_with_its_own_prompt_options_and_place(group: World) -> None:
    assert states(group) == ["QUEUED"] * 3
    dump = group.dump()
    assert sorted(dump["queue"], key=dump["queue"].__getitem__) == list(UIDS)
    works = [group.work(f"f{i}", uid, free=10_000) for i, uid in enumerate(UIDS)]
    assert [len(work.prompt_ids) for work in works] == [20, 20, 5]
    assert [work.sampling.seed for work in works] == [2**62 + 1, 1, 2]
    assert group.read(client_id="client-u").choices == 3
    assert group.admit("v").queued == 1


def test_the_same_admission_again_is_one(group: World) -> None:
    before = group.dump()
    assert group.admit("u", more=(20, 5)).status == "ADMITTED"
    assert group.dump() == before


@pytest.mark.parametrize(("waiting", "status"), [(1, "ADMITTED"), (2, "FULL")])
def test_at_the_limit_all_are_admitted_or_none(world: World, waiting: int, status: AdmitStatus) -> None:
    world.cluster()
    for number in range(waiting):
        world.admit(f"v{number}")
    before = world.dump()
    answer = world.admit("u", more=(20, 5), max_queued=4)
    assert (answer.status, answer.queued) == (status, waiting + 3 * (status == "ADMITTED"))
    assert (world.dump() == before) == (status == "FULL")


def test_none_is_admitted_if_one_fits_nowhere(world: World) -> None:
    world.cluster()
    before = world.dump()
    answer = world.admit("u", more=(20, 1_590))
    assert (answer.status, answer.room_tokens) == ("TOO_LARGE", 1600)
    assert world.dump() == before


def test_the_client_id_is_taken_until_the_last_one_has_ended(group: World) -> None:
    for uid in UIDS:
        answer = group.admit("w", "client-u", more=(3,))
        assert (answer.status, answer.uid) == ("DUPLICATE", "u")
        finish(group, uid)
    assert group.dump()["guards"] == {}
    assert group.admit("w", "client-u", more=(3,)).status == "ADMITTED"


def test_a_finished_group_stays_refused_for_its_window(world: World) -> None:
    world.cluster()
    world.admit("u", more=(20, 5), dedup_window_ms=10_000_000)
    for uid in reversed(UIDS):
        finish(world, uid)
    answer = world.admit("w", "client-u")
    assert (answer.status, answer.uid) == ("DUPLICATE", "u")


def test_records_go_together_once_the_last_one_has_ended(world: World) -> None:
    world.cluster()
    world.admit("u", more=(20, 5), record_ttl_ms=50, key="k")
    finish(world, "u")
    finish(world, "u.1")
    world.admit("v", record_ttl_ms=50)
    world.abort("v")
    world.wait_until(lambda: world.read("v").status == "UNKNOWN")
    assert states(world) == ["FINISHED", "FINISHED", "QUEUED"]
    finish(world, "u.2")
    world.wait_until(lambda: world.read("u.2").status == "UNKNOWN")
    dump = world.dump()
    assert [dump[name] for name in ("records", "latest", "keys", "guards")] == [{}] * 4


@pytest.mark.parametrize("uid", ["u", "u.1"])
def test_an_abort_ends_all_whatever_they_do(group: World, uid: str) -> None:
    finish(group, "u")
    group.work("f", "u.1", free=10_000)
    group.reserve("l", "u.1", free=10_000)
    assert group.abort(uid).status == "ABORTED"
    assert states(group) == ["FINISHED", "ABORTED", "ABORTED"]
    assert group.lease_state() == "CANCELLED"
    assert [group.owned(node) for node in "wpd"] == [set()] * 3
    dump = group.dump()
    assert [dump[name] for name in ("guards", "queue", "rings", "deadlines")] == [{}] * 4
    assert (group.abort(uid).status, group.detach(uid).status) == ("ABORTED", "ABORTED")


def test_one_that_fails_takes_the_others_with_it_as_it_ended(group: World) -> None:
    finish(group, "u")
    group.work("f", "u.1", free=10_000)
    assert group.fail("u.1", kind=FailureKind.FINAL).status == "FAILED"
    assert states(group) == ["FINISHED", "FAILED", "FAILED"]
    ends = [event for event in group.events() if event.state]
    assert [event.uid for event in ends] == list(UIDS)
    assert {(event.state, event.error_code, event.error_detail) for event in ends[1:]} == {
        ("FAILED", "engine_error", "why")
    }
    assert group.dump()["guards"] == {}
    assert group.owned("w") == set()


def test_one_that_can_go_on_disturbs_none(group: World) -> None:
    group.work("f", "u.1", free=10_000)
    assert group.fail("u.1").status == "REQUEUED"
    assert states(group) == ["QUEUED"] * 3


def test_one_that_expires_takes_the_others_with_it(group: World) -> None:
    finish(group, "u.1")
    group.work("f", "u", free=10_000)
    group.advance(60_001)
    for node in "wpd":
        group.beat(node)
    assert group.scan().expired == ("u.2",)
    assert states(group) == ["EXPIRED", "FINISHED", "EXPIRED"]
    assert group.dump()["guards"] == {}


def test_several_that_are_due_at_once_end_once(group: World) -> None:
    group.advance(60_001)
    assert group.scan().expired == ("u",)
    assert states(group) == ["EXPIRED"] * 3
    assert len([event for event in group.events() if event.state]) == 3


def test_the_last_watcher_gone_aborts_all(group: World) -> None:
    finish(group, "u")
    for uid in UIDS:
        group.attach(uid)
    assert group.detach("u").status == "WATCHED"
    assert states(group) == ["FINISHED", "QUEUED", "QUEUED"]
    assert group.detach("u", "other").status == "ABORTED"
    assert states(group) == ["FINISHED", "ABORTED", "ABORTED"]
    assert group.owned("w") == set()


def test_with_a_grace_all_wait_for_it_and_end_together(world: World) -> None:
    world.cluster()
    world.admit("u", more=(20, 5), key="k", grace_ms=1000)
    assert world.detach("u").status == "GRACE"
    assert set(world.dump()["unwatched"]) == set(UIDS)
    world.attach("u.1")
    world.detach("u.1", "other")
    world.advance(1001)
    world.scan()
    assert states(world) == ["ABORTED"] * 3
    assert world.dump()["unwatched"] == {}


def test_a_lost_web_process_ends_all(group: World) -> None:
    finish(group, "u.2")
    group.exit("w")
    assert states(group) == ["ABORTED", "ABORTED", "FINISHED"]
    assert "w" not in group.dump()["owned"]


@pytest.mark.parametrize(("end", "known"), [("finish", True), ("fail", True), ("abort", False), ("overload", False)])
def test_a_key_is_replayed_or_free_as_the_whole_group_has_ended(world: World, end: str, known: bool) -> None:
    world.cluster()
    world.admit("u", more=(20, 5), key="k")
    finish(world, "u")
    if end == "finish":
        finish(world, "u.1")
        finish(world, "u.2")
    elif end == "abort":
        world.abort()
    else:
        kind = FailureKind.FINAL if end == "fail" else FailureKind.OVERLOAD
        for attempt in range(1, 34):
            work = world.work(f"f{attempt}", "u.1", free=10_000)
            world.fail("u.1", fence=work.fence, attempt=attempt, kind=kind)
            if world.state("u.1") == "FAILED":
                break
        assert world.state("u.2") == "FAILED"
    answer = world.admit("v", more=(20, 5), key="k")
    assert (answer.status, answer.uid) == (("KNOWN", "u") if known else ("ADMITTED", "v"))


def test_an_abort_that_overtakes_the_admission_holds_for_all(world: World) -> None:
    world.cluster()
    assert world.abort("u").status == "TOMBSTONED"
    assert world.admit("u", more=(20, 5)).status == "TOMBSTONED"
    assert world.dump()["records"] == {}


def test_uids_that_are_not_the_groups_are_refused(world: World) -> None:
    world.cluster()
    sampling = SamplingParams(seed=1, max_tokens=1)
    admit: Any = Admit("u", "c", (1,), sampling, Watcher("w", "x"), Limits(1, 1, 1, 1, 1))
    other = (Sibling("v.1", (1,), sampling),)
    with pytest.raises(ValueError, match="choices of u"):
        world.do(Admit("u", "c", (1,), sampling, admit.watcher, admit.limits, more=other))
