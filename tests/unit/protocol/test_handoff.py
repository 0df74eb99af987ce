"""The handoff, machine against machine: what goes right, and each way in which it may go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Abort, Activate, Bell, Claim, Emit, FailAttempt, ReserveNext
from app.protocol.messages import Commit, Grant, PullResult
from tests.unit.protocol.cluster import EOS, Cluster, Runner, reference

PROMPT = (5, 6, 7, 8, 9, 10)


def kinds(cluster: Cluster) -> list[str]:
    return [message.kind for message in cluster.sent]


def finish(cluster: Cluster, *uids: str, limit_s: float = 60.0) -> None:
    cluster.run(cluster.ended(*uids), limit_s)
    cluster.run(cluster.at_baseline, 15)


def test_one_request_goes_through_grant_commit_pull_and_is_exact() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.state == "FINISHED"
    assert record.output_ids == reference(PROMPT, 10)
    assert kinds(cluster) == ["grant", "commit", "pull_result"]
    assert (record.attempt, record.failures) == (1, 0)


def test_forty_requests_on_two_and_two_nodes_are_exact_and_use_both_decode_nodes() -> None:
    cluster = Cluster(prefill=2, decode=2, num_blocks=24)
    asked = {cluster.submit((n + 1, 2 * n, 3, 4, 5)[: 1 + n % 5], 4 + n % 9): n for n in range(40)}
    finish(cluster, *asked)
    for uid, n in asked.items():
        record = cluster.snapshot(uid)
        assert record.output_ids == reference((n + 1, 2 * n, 3, 4, 5)[: 1 + n % 5], 4 + n % 9)
    assert {cluster.snapshot(uid).decode_node for uid in asked} >= {"d0", "d1"}


def test_a_first_token_that_ends_the_answer_never_starts_decode() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 1)
    finish(cluster, uid)
    assert cluster.snapshot(uid).output_ids == reference(PROMPT, 1)
    assert kinds(cluster) == []
    assert cluster.runners["d0"].outcomes in ([], ["nothing"])


def test_a_first_token_that_is_eos_ends_the_answer_and_cancels_the_lease() -> None:
    prompt = next((n,) for n in range(1, 1000) if reference((n,), 5) == (EOS,))
    cluster = Cluster()
    uid = cluster.submit(prompt, 5)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.state, record.output_ids, record.finish_reason) == ("FINISHED", (EOS,), "stop")
    assert "commit" not in kinds(cluster)


@pytest.mark.parametrize("lost", [Grant, Commit, PullResult])
def test_a_lost_message_costs_a_retry_at_most(lost: type) -> None:
    cluster = Cluster()
    drops = iter([True])
    cluster.lose_message = lambda message: isinstance(message, lost) and next(drops, False)
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.state == "FINISHED"
    assert record.output_ids == reference(PROMPT, 10)
    assert record.failures == (0 if lost is PullResult else 1)


@pytest.mark.parametrize("lost", [Grant, Commit])
def test_out_of_attempts_the_client_is_told_which_hop_failed(lost: type) -> None:
    cluster = Cluster()
    cluster.lose_message = lambda message: isinstance(message, lost)
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.state == "FAILED"
    assert record.error_code == f"{lost.__name__.lower()}_unacknowledged"


@pytest.mark.parametrize("lost", [Grant, Commit, PullResult])
def test_a_lost_acknowledgement_leaves_one_exact_answer(lost: type) -> None:
    cluster = Cluster()
    drops = iter([True])
    cluster.lose_reply = lambda message: isinstance(message, lost) and next(drops, False)
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    assert cluster.snapshot(uid).output_ids == reference(PROMPT, 10)


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


@pytest.mark.parametrize("command", [Claim, ReserveNext, Emit, Activate])
@pytest.mark.parametrize("fault", ["lost", "unanswered"])
def test_an_unknown_outcome_is_asked_again_until_it_is_known(command: type, fault: str) -> None:
    cluster = Cluster()
    faults = iter([fault, fault])
    cluster.ledger_fault = lambda asked: next(faults, "") if isinstance(asked, command) else ""
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(PROMPT, 10)
    assert (record.attempt, record.failures) == (1, 0)


def test_what_the_ledger_gives_but_the_node_does_not_hold_is_handed_back() -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: True
    uid = cluster.submit(PROMPT, 10)
    late = Claim(uid, "p0", "a fence whose answer never came", 16, 4)
    cluster.ledger.execute(late)
    cluster.lose_bell = lambda bell: False
    finish(cluster, uid, limit_s=6)
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(PROMPT, 10)
    assert (record.attempt, record.failures) == (2, 0)


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.012, 0.016, 0.018, 0.02, 0.05, 0.1])
def test_an_abort_at_any_time_brings_every_block_back(after_s: float) -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    uid = cluster.submit(PROMPT, 50)
    cluster.run(limit_s=after_s)
    cluster.ledger.execute(Abort(uid, "test"))
    cluster.run(cluster.at_baseline, 3)
    assert cluster.snapshot(uid).state == "ABORTED"
    other = cluster.submit((77, 78), 10, client="same blocks, another prompt")
    finish(cluster, other)
    assert cluster.snapshot(other).output_ids == reference((77, 78), 10)


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("after_s", [0.004, 0.015, 0.018, 0.03, 0.08])
def test_a_node_that_dies_is_replaced_and_the_answer_goes_on(victim: str, after_s: float) -> None:
    cluster = Cluster(prefill=2, decode=2)
    cluster.lose_bell = lambda bell: False
    cluster.run(limit_s=1)
    uids = [cluster.submit((n, 2, 3), 12) for n in range(4)]
    cluster.run(limit_s=after_s)
    cluster.runners[victim].dead = True
    finish(cluster, *uids)
    assert [cluster.snapshot(uid).output_ids for uid in uids] == [reference((n, 2, 3), 12) for n in range(4)]


def test_corrupted_kv_is_caught_and_the_attempt_retried() -> None:
    cluster = Cluster()
    original = cluster.runners["p0"].seal
    spoiled = iter([True])

    def spoil(job: object) -> None:
        original(job)  # type: ignore[arg-type]
        if next(spoiled, False):
            cluster.runners["p0"].memory[job.blocks[0]][0] ^= 1  # type: ignore[attr-defined]

    cluster.runners["p0"].seal = spoil  # type: ignore[method-assign, assignment]
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(PROMPT, 10)
    assert record.failures == 1


def test_a_ledger_that_is_away_pauses_the_sequence_and_loses_no_token() -> None:
    cluster = Cluster()
    prompt = next((n, 3) for n in range(1, 200) if len(reference((n, 3), 40)) == 40)
    uid = cluster.submit(prompt, 40)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 3)
    away_until = cluster.now + 4
    cluster.ledger_fault = lambda asked: "lost" if cluster.now < away_until else ""
    cluster.run(limit_s=3.5)
    lease = next(iter(cluster.runners["d0"].machine.table.values()))
    assert len(lease.output) <= 3 + 2 + 6 + 1, "it paused at its bound"  # type: ignore[union-attr]
    finish(cluster, uid)
    assert cluster.snapshot(uid).output_ids == reference(prompt, 40)


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
    prompt = next((n, 3) for n in range(1, 200) if len(reference((n, 3), 30)) == 30)
    uid = cluster.submit(prompt, 30)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 5)
    name = cluster.snapshot(uid).decode_node
    cluster.runners[name].feed(on.DrainAsked())
    cluster.runners[name].feed(on.HandBackAsked())
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(prompt, 30)
    assert record.failures == 0


def test_without_a_grant_the_kv_is_kept_unless_an_older_request_needs_the_room() -> None:
    cluster = Cluster(decode=0, num_blocks=4)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: bell.queue == "prefill"
    older = cluster.submit(tuple(range(1, 16)), 5, queue_timeout_ms=600_000)  # all four blocks
    younger = cluster.submit((1, 2, 3), 5, first_token_timeout_ms=600_000)
    cluster.runners["p0"].feed(on.BellRang("b", younger, 1))
    cluster.run(lambda: cluster.snapshot(younger).state == "PREFILLING", 5)
    claimed_at = cluster.now
    cluster.run(lambda: cluster.snapshot(older).state == "PREFILLING", 60)
    assert 30 <= cluster.now - claimed_at <= 40, "only after grant_timeout_s"
    record = cluster.snapshot(younger)
    assert (record.state, record.attempt, record.failures) == ("QUEUED", 2, 0)


def test_a_node_that_was_declared_dead_lets_go_and_comes_back() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    runner = cluster.runners["d0"]
    runner.freeze()  # silent for longer than its TTL, with nothing in its table
    cluster.run(limit_s=8)
    runner.thaw()
    again = cluster.submit((9, 9, 9), 10)
    finish(cluster, again)
    assert cluster.snapshot(again).output_ids == reference((9, 9, 9), 10)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"uid": "another"}, "unknown_attempt"),
        ({"attempt": 2}, "unknown_attempt"),
        ({"fence": "another"}, "unknown_attempt"),
        ({"lease_id": "another"}, "other_lease"),
    ],
)
def test_a_stale_message_is_refused_by_name_and_counted(change: dict[str, object], reason: str) -> None:
    cluster = Cluster()
    cluster.lose_message = lambda message: isinstance(message, Commit)
    cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(lambda: "commit" in kinds(cluster))
    grant = next(message for message in cluster.sent if isinstance(message, Grant))
    prefill = cluster.runners["p0"].machine
    cluster.replies["forged"] = lambda reply: None
    cluster.runners["p0"].feed(on.Called("forged", grant.model_copy(update=change)))
    assert prefill.refusals == {reason: 1}


def test_a_commit_with_unequal_lists_is_refused() -> None:
    cluster = Cluster()
    spoil = iter([True])
    deliver = cluster.deliver

    def cut(sender: object, call: object) -> None:
        message = call.message  # type: ignore[attr-defined]
        if isinstance(message, Commit) and next(spoil, False):
            call = replace(call, message=message.model_copy(update={"generations": message.generations[:-1]}))  # type: ignore[type-var]
        deliver(sender, call)  # type: ignore[arg-type]

    cluster.deliver = cut  # type: ignore[method-assign, assignment]
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    assert cluster.runners["d0"].machine.refusals == {"block_count": 1}
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(PROMPT, 10)
    assert record.failures == 1


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


def test_a_block_that_was_given_away_before_it_was_sealed_is_noticed() -> None:
    cluster = Cluster()
    spoil = iter([True])
    runner = cluster.runners["p0"]
    original = runner.seal

    def seal(job: do.Seal) -> None:
        if next(spoil, False):
            runner.generations[job.blocks[0]] += 1
        original(job)

    runner.seal = seal  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.output_ids, record.failures) == (reference(PROMPT, 10), 1)


def test_a_lost_registration_with_a_stuck_mover_waits_in_one_timer() -> None:
    cluster = Cluster()
    runner = cluster.runners["d0"]
    runner.pull = lambda job: None  # type: ignore[method-assign, assignment]
    cluster.submit(PROMPT, 10)
    cluster.run(lambda: "commit" in kinds(cluster), 5)
    for _ in range(50):
        runner.feed(on.RegistrationLost())
        cluster.run(limit_s=0.05)
    assert len(runner.machine._timers) < 10


def answer_late(cluster: Cluster, seconds: float, *kinds: type, node: str = "") -> None:
    """Let questions of these kinds (of one node) reach the ledger ``seconds`` late."""
    ask = cluster.ask

    def later(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, kinds) and runner.incarnation.startswith(node):
            cluster.after(seconds, lambda: ask(runner, question))
        else:
            ask(runner, question)

    cluster.ask = later  # type: ignore[method-assign]


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


def test_a_claim_that_was_applied_late_does_not_cost_the_request_its_only_attempt() -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: True
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    late = Claim(uid, "p0", "fence of a call that was given up", 16, 4)
    cluster.ledger.apply(late, cluster.ledger.time_ms() + 5000)
    cluster.lose_bell = lambda bell: False
    cluster.runners["d0"].feed(on.BellRang("b", uid, 1))
    cluster.run(cluster.ended(uid), 20)
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 0, reference(PROMPT, 10))


def test_registering_again_does_not_add_rounds_of_checks() -> None:
    cluster = Cluster()
    cluster.run(limit_s=2)
    for _ in range(5):
        cluster.runners["d0"].feed(on.RegistrationLost())
        cluster.run(limit_s=2)
    questions: list[do.Ask] = []
    ask = cluster.ask
    cluster.ask = lambda runner, question: (questions.append(question), ask(runner, question))  # type: ignore
    cluster.run(limit_s=10)
    assert len(questions) <= 22, "two nodes, one check a second each"


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
