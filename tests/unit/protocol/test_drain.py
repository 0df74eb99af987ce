"""A draining node begins nothing, and gives back at once what it has not begun."""

from __future__ import annotations

import pytest

from app.protocol import events as on
from app.protocol.commands import Activate, Bell, Claim, Command, Drain, FailAttempt, ReserveNext
from tests.unit.protocol.cluster import Cluster, reference
from tests.unit.protocol.rest import answer_late, finish

PROMPT = (5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize(("name", "question"), [("p0", Claim), ("d0", ReserveNext)])
def test_what_is_given_after_the_drain_began_is_done_by_another_node(name: str, question: type) -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)

    def drain_meanwhile(command: Command) -> str:
        if isinstance(command, question) and not cluster.runners[name].machine.draining:
            cluster.runners[name].feed(on.DrainAsked())
            cluster._add("prefill", "p1", 16, 8)
            cluster._add("decode", "d1", 16, 8)
        return ""

    cluster.ledger_fault = drain_meanwhile
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(cluster.ended(uid), 10)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 2, reference(PROMPT, 10))
    assert name not in (record.prefill_node, record.decode_node)


def test_a_computed_prompt_without_a_grant_is_handed_back_at_once() -> None:
    cluster = Cluster(decode=0)
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(limit_s=1.5)
    cluster.runners["p0"].feed(on.DrainAsked())
    cluster.run(limit_s=0.1)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.failures) == ("QUEUED", 2, 0)
    assert cluster.runners["p0"].machine.idle


def test_a_draining_prefill_node_hands_back_and_the_other_one_takes_over() -> None:
    cluster = Cluster(prefill=2)
    cluster.run(limit_s=1)
    uids = [cluster.submit((n, 2, 3), 8) for n in range(6)]
    cluster.run(limit_s=0.006)
    cluster.runners["p0"].feed(on.DrainAsked())
    finish(cluster, *uids)
    assert [cluster.snapshot(uid).output_ids for uid in uids] == [reference((n, 2, 3), 8) for n in range(6)]
    assert all(cluster.snapshot(uid).failures == 0 for uid in uids)
    assert not cluster.runners["p0"].machine.wants_bells


def test_a_draining_decode_node_that_hands_back_loses_no_token() -> None:
    cluster = Cluster(decode=2)
    prompt = long_prompt()
    uid = cluster.submit(prompt, 30)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 5)
    name = cluster.snapshot(uid).decode_node
    cluster.runners[name].feed(on.DrainAsked())
    cluster.runners[name].feed(on.HandBackAsked())
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(prompt, 30)
    assert record.failures == 0


def test_a_drain_rings_again_for_the_bells_it_drops() -> None:
    cluster = Cluster(prefill=2)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: True
    uid = cluster.submit(PROMPT, 5)
    rung: list[Bell] = []
    cluster.lose_bell = lambda bell: rung.append(bell) is None
    node = cluster.runners["p0"]
    cluster.ledger_fault = lambda asked: "lost"
    node.feed(on.BellRang("asks", "", 0))  # its question is in flight for as long as the ledger is away
    node.feed(on.BellRang("waits", uid, 1))
    node.feed(on.DrainAsked())
    assert rung == [Bell("prefill", uid, 1)]
    assert "draining" in node.outcomes


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_work_that_is_given_after_a_drain_began_is_handed_back(name: str) -> None:
    cluster = Cluster(prefill=2, decode=2)
    cluster.run(limit_s=1)
    command = Claim if name == "p0" else ReserveNext
    asked: list[bool] = []

    def drain_meanwhile(question: object) -> str:
        if isinstance(question, command) and question.incarnation == name and not asked:
            asked.append(True)
            cluster.runners[name].feed(on.DrainAsked())
        return ""

    cluster.ledger_fault = drain_meanwhile
    uids = [cluster.submit((n, 2, 3), 8) for n in range(4)]
    finish(cluster, *uids)
    assert asked
    assert [cluster.snapshot(uid).output_ids for uid in uids] == [reference((n, 2, 3), 8) for n in range(4)]
    assert all(cluster.snapshot(uid).failures == 0 for uid in uids)
    assert cluster.runners[name].machine.idle


@pytest.mark.parametrize("after_ms", range(10, 90, 4))
def test_a_hand_back_by_decode_in_any_phase_is_nobodys_failure(after_ms: int) -> None:
    cluster = Cluster(decode=2)
    cluster.run(limit_s=1)
    answer_late(cluster, 0.05, Activate)
    answer_late(cluster, 0.005, FailAttempt, node="d")
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(limit_s=after_ms / 1000)
    for name in ("d0", "d1"):
        if cluster.runners[name].machine.table:
            cluster.runners[name].feed(on.DrainAsked())
            cluster.runners[name].feed(on.HandBackAsked())
    cluster.run(cluster.ended(uid), 20)
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 0, reference(PROMPT, 10))


def long_prompt() -> tuple[int, int]:
    return next((n, 3) for n in range(1, 200) if len(reference((n, 3), 30)) == 30)


def test_a_node_that_the_ledger_was_asked_to_drain_takes_nothing_more_and_finishes_what_it_has() -> None:
    cluster = Cluster(decode=2)
    prompt = long_prompt()
    first = cluster.submit(prompt, 30)
    cluster.run(lambda: len(cluster.snapshot(first).output_ids) >= 5)
    name = cluster.snapshot(first).decode_node
    drained = cluster.runners[name].machine
    cluster.ledger.execute(Drain(drained.config.incarnation))
    later = cluster.submit((7, 8), 8)
    finish(cluster, first, later)
    assert (cluster.snapshot(first).decode_node, cluster.snapshot(first).attempt) == (name, 1)
    assert cluster.snapshot(later).decode_node != name
    cluster.run(lambda: drained.draining, 1)  # by its next heartbeat it has heard of it
    assert drained.idle


def test_a_drain_gives_back_after_its_time_what_has_not_finished_and_a_second_one_does_not_prolong_it() -> None:
    cluster = Cluster(decode=2)
    prompt = long_prompt()
    uid = cluster.submit(prompt, 30)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 5)
    name = cluster.snapshot(uid).decode_node
    node = cluster.runners[name]
    node.feed(on.DrainAsked(hand_back_after_s=0.02))
    node.feed(on.DrainAsked(hand_back_after_s=60.0))
    cluster.run(limit_s=0.015)
    assert cluster.snapshot(uid).attempt == 1
    cluster.run(lambda: cluster.snapshot(uid).attempt == 2, 1)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.output_ids, record.failures) == (reference(prompt, 30), 0)
    assert record.decode_node != name
