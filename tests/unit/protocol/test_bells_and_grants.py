"""How work comes to a node: by bells, by one question at a time, by ringing again; a grant may come early."""

from __future__ import annotations

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Bell, Claim, Emit, FailAttempt, ReserveNext
from tests.unit.protocol.cluster import EOS, Cluster, Runner, reference
from tests.unit.protocol.rest import answer_late, finish, kinds

PROMPT = (5, 6, 7, 8, 9, 10)


def test_decode_is_rung_for_again_after_1_2_4_and_then_every_4_seconds() -> None:
    cluster = Cluster(decode=0)
    cluster.run(limit_s=1)
    rung: list[float] = []

    def hear(bell: Bell) -> bool:
        if bell.queue == "decode":
            rung.append(cluster.now)
        return False

    cluster.lose_bell = hear
    cluster.submit(PROMPT, 10)
    cluster.run(limit_s=18)
    assert [round(at - rung[0]) for at in rung] == [0, 1, 3, 7, 11, 15]


def test_a_grant_that_overtakes_the_answer_to_our_claim_is_taken() -> None:
    cluster = Cluster()
    ask = cluster.ask

    def slowly(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, Claim):
            answer = cluster.ledger.execute(question.command)
            cluster.after(0.5, lambda: runner.feed(on.Answered(question.tag, answer)))
        else:
            ask(runner, question)

    cluster.ask = slowly  # type: ignore[method-assign]
    cluster.run(limit_s=1)
    uid = cluster.submit(PROMPT, 10)
    cluster.run(limit_s=0.05)
    cluster.runners["d0"].feed(on.BellRang("b", uid, 1))
    cluster.run(cluster.ended(uid), 5)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 1, reference(PROMPT, 10))
    assert [message.kind for message in cluster.sent] == ["grant", "commit", "pull_result"]


def test_two_bells_at_once_are_not_promised_the_same_blocks() -> None:
    cluster = Cluster(num_blocks=4)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: bell.queue == "prefill"
    uids = [cluster.submit((n, *range(11)), 3) for n in range(2)]  # three blocks each
    for uid in uids:
        cluster.runners["p0"].feed(on.BellRang(cluster.draw(), uid, 1))
    cluster.run(cluster.ended(*uids), 10)
    for n, uid in enumerate(uids):
        assert cluster.snapshot(uid).output_ids == reference((n, *range(11)), 3)


@pytest.mark.parametrize("queue", ["prefill", "decode"])
def test_a_lost_bell_costs_seconds(queue: str) -> None:
    cluster = Cluster()
    cluster.run(limit_s=2)
    drops = iter([True])
    cluster.lose_bell = lambda bell: bell.queue == queue and next(drops, False)
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid, limit_s=4)
    assert cluster.snapshot(uid).output_ids == reference(PROMPT, 10)


def test_doubled_bells_start_nothing_twice() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 10)
    for runner in cluster.runners.values():
        for _ in range(3):
            runner.feed(on.BellRang(cluster.draw(), uid, 1))
    finish(cluster, uid)
    assert cluster.snapshot(uid).output_ids == reference(PROMPT, 10)
    assert kinds(cluster) == ["grant", "commit", "pull_result"]


def test_a_node_with_room_for_one_takes_one_bell_and_leaves_the_others_to_others() -> None:
    cluster = Cluster(max_num_seqs=1)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: True
    for n in range(3):
        cluster.submit((n, 2, 3), 5)
    node = cluster.runners["p0"].machine
    assert node.wants_bells
    cluster.runners["p0"].feed(on.BellRang("first", "", 0))
    assert not node.wants_bells, "its question is in flight"
    cluster.run(lambda: len(node.table) == 1, 5)
    assert not node.wants_bells, "it is full"


def test_what_a_node_finds_by_itself_it_goes_on_finding_without_a_pause() -> None:
    cluster = Cluster(max_num_seqs=8)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: bell.queue == "prefill"
    uids = [cluster.submit((n, 2, 3), 5) for n in range(8)]
    started = cluster.now
    cluster.run(lambda: all(cluster.snapshot(uid).state != "QUEUED" for uid in uids), 10)
    assert cluster.now - started < 2.5, "one look a second would take eight"


def test_a_node_that_found_an_empty_queue_waits_to_be_rung() -> None:
    cluster = Cluster()
    cluster.run(limit_s=3)
    asked: list[type] = []
    ask = cluster.ask

    def note(runner: Runner, question: do.Ask) -> None:
        asked.append(type(question.command))
        ask(runner, question)

    cluster.ask = note  # type: ignore[method-assign]
    for n in range(4):
        finish(cluster, cluster.submit((n, 2, 3), 5))
    cluster.run(limit_s=3)
    assert asked.count(Claim) == 4, "each request rang once"
    assert 4 <= asked.count(ReserveNext) <= 5, "one may have found its own way, and then looked whether there are more"


def test_without_a_grant_the_kv_is_kept_unless_an_older_request_needs_the_room() -> None:
    cluster = Cluster(decode=0, num_blocks=4)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: bell.queue == "prefill"
    older = cluster.submit(tuple(range(1, 16)), 2, queue_timeout_ms=600_000)  # all four blocks
    younger = cluster.submit((1, 2, 3), 5, first_token_timeout_ms=600_000)
    cluster.runners["p0"].feed(on.BellRang("b", younger, 1))
    cluster.run(lambda: cluster.snapshot(younger).state == "PREFILLING", 5)
    claimed_at = cluster.now
    cluster.run(lambda: cluster.snapshot(older).state == "PREFILLING", 60)
    assert 30 <= cluster.now - claimed_at <= 40, "only after grant_timeout_s"
    record = cluster.snapshot(younger)
    assert (record.state, record.attempt, record.failures) == ("QUEUED", 2, 0)


def test_a_grant_that_meets_a_hand_back_is_nobodys_failure() -> None:
    cluster = Cluster(prefill=2)
    cluster.run(limit_s=1)
    answer_late(cluster, 0.1, ReserveNext)
    answer_late(cluster, 0.1, FailAttempt, node="p")
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(limit_s=0.08)
    cluster.runners[cluster.ledger.store.records[uid].owner].feed(on.DrainAsked())
    cluster.run(cluster.ended(uid), 20)
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 0, reference(PROMPT, 10))


def test_a_grant_that_meets_an_end_at_the_first_token_costs_nothing() -> None:
    prompt = next((n,) for n in range(1, 1000) if reference((n,), 5) == (EOS,))
    cluster = Cluster()
    cluster.run(limit_s=1)
    answer_late(cluster, 0.1, Emit)
    answer_late(cluster, 0.03, ReserveNext)
    uid = cluster.submit(prompt, 5, max_attempts=1)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert "grant" in kinds(cluster)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 0, (EOS,))
