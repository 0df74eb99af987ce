"""What counts as a failure of a request, and what is only the misfortune of having been there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Activate, Claim, Command, ReportExit, ReserveNext, Stamp
from app.protocol.messages import Activating, Commit, Grant, Message, PullResult, Refusal, refused
from tests.unit.protocol.cluster import TICK, Cluster, Runner, reference

PROMPT = (5, 6, 7, 8, 9, 10)
LONG = tuple(range(1, 12))


def finish(cluster: Cluster, *uids: str, limit_s: float = 60.0) -> None:
    cluster.run(cluster.ended(*uids), limit_s)
    cluster.run(cluster.at_baseline, 15)


def test_a_prefill_node_that_dies_costs_only_those_in_its_step_an_attempt() -> None:
    cluster = Cluster(prefill=1, num_blocks=32)
    _compute_for(cluster, 1.0)
    machine = cluster.runners["p0"].machine
    machine.config = replace(machine.config, max_num_batched_tokens=len(LONG) + 1)
    cluster.run(limit_s=1)
    uids = [cluster.submit((n, *LONG), 6) for n in range(3)]
    cluster.run(lambda: len(cluster.runners["p0"].machine.table) == 3, 5)
    cluster.run(limit_s=0.1)
    in_step = {running.job.work.uid for running in cluster.runners["p0"].sequences.values()}
    cluster.runners["p0"].dead = True
    cluster._add("prefill", "p1", 32, 8)
    finish(cluster, *uids)
    assert len(in_step) == 1
    assert {uid for uid in uids if cluster.snapshot(uid).failures} == in_step
    assert [cluster.snapshot(uid).output_ids for uid in uids] == [reference((n, *LONG), 6) for n in range(3)]


def test_a_computed_prompt_that_waits_for_a_grant_is_not_blamed_for_its_node() -> None:
    cluster = Cluster(prefill=1, decode=0)
    cluster.run(limit_s=1)
    uid = cluster.submit(PROMPT, 6, max_attempts=1)
    cluster.run(lambda: cluster.runners["p0"].machine.gauges() == {"running": 0, "waiting": 1}, 5)
    cluster.run(limit_s=0.1)
    cluster.runners["p0"].dead = True
    cluster.ledger.execute(ReportExit("p0"))
    cluster._add("prefill", "p1", 16, 8)
    cluster._add("decode", "d0", 16, 8)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 0, reference(PROMPT, 6))


def test_a_lease_whose_node_dies_before_the_activation_costs_nothing() -> None:
    cluster = Cluster(decode=1)
    cluster.lose_message = lambda message: isinstance(message, Commit)
    uid = cluster.submit(PROMPT, 6, max_attempts=2)
    cluster.run(lambda: any(isinstance(message, Commit) for message in cluster.sent), 5)
    cluster.runners["d0"].dead = True
    cluster.run(limit_s=1)  # the failed COMMIT counts; the dead node does not
    cluster.lose_message = lambda message: False
    cluster._add("decode", "d1", 16, 8)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 1, reference(PROMPT, 6))


def test_what_the_engine_computes_was_stamped_before() -> None:
    cluster = Cluster(prefill=2, decode=2, num_blocks=24)
    stamped: set[tuple[str, str]] = set()

    def watch(command: Command) -> str:
        if isinstance(command, Stamp) and command.in_step:
            stamped.add((command.uid, command.fence))
        return ""

    cluster.ledger_fault = watch
    for name in ("p0", "p1"):
        _check_at_start(cluster.runners[name])
    uids = [cluster.submit((n, 2, 3), 5) for n in range(20)]
    finish(cluster, *uids)
    assert stamped, "some had to stand in line"
    assert all(cluster.snapshot(uid).state == "FINISHED" for uid in uids)


def test_of_a_prompt_that_kills_its_node_the_neighbours_survive() -> None:
    cluster = Cluster(prefill=5, decode=1, num_blocks=32)
    poison = (13, 13, 13)
    for name in ("p0", "p1", "p2", "p3", "p4"):
        _dies_of(cluster.runners[name], poison)
    cluster.run(limit_s=1)
    killer = cluster.submit(poison, 6)
    uids = [cluster.submit((n, 2, 3), 6) for n in range(12)]
    finish(cluster, killer, *uids, limit_s=120)
    record = cluster.snapshot(killer)
    assert (record.state, record.error_code, record.failures) == ("FAILED", "node_lost", 3)
    assert [cluster.snapshot(uid).output_ids for uid in uids] == [reference((n, 2, 3), 6) for n in range(12)]
    assert sum(runner.dead for runner in cluster.runners.values()) == 3


def test_a_decode_node_whose_link_is_cut_does_not_use_up_a_requests_attempts() -> None:
    cluster = Cluster(prefill=2, decode=2)
    deliver = cluster.deliver

    def cut(sender: Runner, call: do.Call) -> None:
        lost = "d0" in (sender.incarnation, call.incarnation)
        cluster.lose_message = lambda message: lost
        deliver(sender, call)

    cluster.deliver = cut  # type: ignore[method-assign]
    cluster.run(limit_s=1)
    for n in range(20):
        uid = cluster.submit((n, 2, 3), 6)
        finish(cluster, uid)
        record = cluster.snapshot(uid)
        assert (record.state, record.output_ids) == ("FINISHED", reference((n, 2, 3), 6))
        assert record.failures <= 1


@pytest.mark.parametrize("timeout_s", [0.001, 2.0, 4.5])
def test_a_ledger_that_is_silent_to_decode_during_activation_is_nobodys_failure(timeout_s: float) -> None:
    cluster = Cluster()
    silent_until = [0.0]
    ask = cluster.ask

    def silent(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, Activate):
            silent_until[0] = silent_until[0] or cluster.now + 15
        if runner.incarnation == "d0" and cluster.now < silent_until[0]:
            cluster.after(timeout_s, lambda: runner.feed(on.AskFailed(question.tag, "silent")))
        else:
            ask(runner, question)

    cluster.ask = silent  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 6, max_attempts=1)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert any(isinstance(message, Activating) for message in cluster.sent)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 1, reference(PROMPT, 6))
    assert not cluster.ledger.store.avoided


def test_decode_that_is_silent_itself_costs_the_attempt() -> None:
    cluster = Cluster()

    def never(message: Message) -> bool:
        return isinstance(message, Activating | PullResult)

    cluster.lose_message = never
    cluster.ledger_fault = lambda command: "lost" if isinstance(command, Activate) else ""
    uid = cluster.submit(PROMPT, 6, max_attempts=1)
    cluster.run(cluster.ended(uid), 30)
    record = cluster.snapshot(uid)
    assert (record.state, record.error_code) == ("FAILED", "pull_timeout")


def test_a_grant_that_waits_for_a_slow_claim_is_nobodys_failure() -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    ask = cluster.ask
    once = iter([True])

    def slow(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, Claim) and next(
            once, False
        ):  # applied at once, but the answer is long under way
            answer = cluster.ledger.execute(question.command)
            cluster.after(5, lambda: runner.feed(on.Answered(question.tag, answer)))
        else:
            ask(runner, question)

    cluster.ask = slow  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 6, max_attempts=1)
    cluster.run(limit_s=0.02)
    cluster.runners["d0"].feed(on.BellRang("b", uid, 1))
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 0, reference(PROMPT, 6))


def test_a_lease_that_the_ledger_forgot_is_nobodys_failure() -> None:
    cluster = Cluster(decode=2)
    cluster.run(limit_s=1)
    _compute_for(cluster, 5.0)
    uid = cluster.submit(LONG, 6, max_attempts=1)
    before: list[object] = []

    def remember(command: Command) -> str:
        if type(command).__name__ == "ReserveNext" and cluster.ledger.store.records[uid].state == "PREFILLING":
            before[:] = before or [cluster.ledger.save()]
        return ""

    cluster.ledger_fault = remember
    cluster.run(lambda: any(isinstance(message, Grant) for message in cluster.sent), 10)
    cluster.run(limit_s=0.1)
    cluster.ledger.restore(before[0])  # type: ignore[arg-type]
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 0, reference(LONG, 6))


@pytest.mark.parametrize("found_by", ["activation", "commit"])
def test_a_lease_that_the_ledger_forgot_is_nobodys_failure_whoever_finds_out(found_by: str) -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    if found_by == "commit":
        _compute_for(cluster, 1.6)
    before: list[object] = []
    rolled_back: list[bool] = []
    uid = cluster.submit(LONG, 6, max_attempts=1)

    def forget(command: Command) -> str:
        if isinstance(command, ReserveNext):
            if rolled_back and not _refused(cluster, "unknown_attempt") and found_by == "commit":
                return "lost"  # it has not reserved anew when the COMMIT comes
            if cluster.ledger.store.records[uid].state == "PREFILLING":
                before[:] = before or [cluster.ledger.save()]
        if isinstance(command, Activate) and not rolled_back:
            rolled_back.append(True)
            cluster.ledger.restore(before[0])  # type: ignore[arg-type]
        return ""

    cluster.ledger_fault = forget
    if found_by == "commit":
        cluster.run(lambda: any(isinstance(message, Grant) for message in cluster.sent), 10)
        cluster.run(limit_s=0.05)
        rolled_back.append(True)
        cluster.ledger.restore(before[0])  # type: ignore[arg-type]
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 0, reference(LONG, 6))
    assert _refused(cluster, "unknown_attempt") == (found_by == "commit")
    assert not cluster.ledger.store.avoided


def _refused(cluster: Cluster, reason: str) -> bool:
    return any(reason in runner.machine.refusals for runner in cluster.runners.values())


@pytest.mark.parametrize("kind", [Grant, Commit])
def test_a_peer_that_has_started_anew_is_nobodys_failure(kind: type) -> None:
    cluster = Cluster()
    deliver = cluster.deliver
    once = iter([True])

    def restarted(sender: Runner, call: do.Call) -> None:
        if isinstance(call.message, kind) and next(once, False):
            reply = refused(Refusal.INCARNATION, "another life")
            cluster.after(TICK, lambda: sender.feed(on.CallEnded(call.tag, reply)))
        else:
            deliver(sender, call)

    cluster.deliver = restarted  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 6, max_attempts=1)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 2, reference(PROMPT, 6))


@pytest.mark.parametrize("seconds", [0.5, 1.2, 1.9, 5.0])
def test_claims_that_are_always_answered_late_make_no_request_go_round_and_round(seconds: float) -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    ask = cluster.ask

    def slow(runner: Runner, question: do.Ask) -> None:
        if runner.incarnation == "p0":
            answer = cluster.ledger.execute(question.command)
            cluster.after(seconds, lambda: runner.feed(on.Answered(question.tag, answer)))
        else:
            ask(runner, question)

    cluster.ask = slow  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 6)
    finish(cluster, uid, limit_s=30)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 1, reference(PROMPT, 6))


@pytest.mark.parametrize("kind", [Grant, Commit])
def test_out_of_attempts_a_failed_hop_is_the_clients_error(kind: type) -> None:
    cluster = Cluster()
    cluster.lose_message = lambda message: isinstance(message, kind)
    uid = cluster.submit(PROMPT, 6, max_attempts=1)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert (record.state, record.error_code) == ("FAILED", f"{kind.__name__.lower()}_unacknowledged")


def _check_at_start(runner: Runner) -> None:
    """Each sequence that enters the engine must be one that the ledger counts as in step."""
    start = runner.start

    def checked(job: do.Start) -> None:
        assert runner.cluster.ledger.store.records[job.work.uid].stamped, job
        start(job)

    runner.start = checked  # type: ignore[method-assign]


def _dies_of(runner: Runner, prompt: tuple[int, ...]) -> None:
    step = runner.step

    def maybe() -> None:
        if any(running.job.work.prompt_ids == prompt for running in runner.sequences.values()):
            runner.dead = True
        step()

    runner.step = maybe  # type: ignore[method-assign]


def _compute_for(cluster: Cluster, seconds: float) -> None:
    """Prefill takes so long that a grant comes first."""
    runner = cluster.runners["p0"]
    step = runner.step
    runner.step = lambda: cluster.after(seconds, step)  # type: ignore[method-assign]
