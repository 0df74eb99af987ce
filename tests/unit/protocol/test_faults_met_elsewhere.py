"""Faults that other systems met, tried on the machines: late and foreign KV, dead peers, odd starts, lost locks."""

from __future__ import annotations

import itertools

import pytest

from app.ledger.memory.state import Store
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Abort, Admit, AdmitStatus, Command, Register, ReportExit, Watcher
from app.protocol.messages import Commit, Grant, PullResult
from app.schemas import NodeInfo, SamplingParams
from tests.unit.protocol.cluster import LIMITS, Cluster, Runner, reference
from tests.unit.protocol.rest import assert_exact, come_to_rest, expect_exact, take_longer

PROMPT = (5, 6, 7, 8, 9, 10)
CANARY = next((n, 8) for n in range(1, 200) if len(reference((n, 8), 10)) == 10)


def cut_off(cluster: Cluster, caller: str, callee: str) -> None:
    """No call of ``caller`` reaches ``callee`` any more."""
    deliver = cluster.deliver

    def lossy(sender: Runner, call: do.Call) -> None:
        lost = (sender.incarnation, call.incarnation) == (caller, callee)
        cluster.lose_message = lambda message: lost
        deliver(sender, call)

    cluster.deliver = lossy  # type: ignore[method-assign]


# late and foreign KV


def test_a_pull_that_comes_after_the_blocks_went_to_other_prompts_is_refused_and_the_request_retried() -> None:
    cluster = Cluster(num_blocks=8)
    prefill, decode = cluster.runners["p0"], cluster.runners["d0"]
    pulls = take_longer(decode, "pull", 8.0, how_often=1)  # longer than prefill holds its blocks
    uid = cluster.submit(PROMPT, 10, max_attempts=2)
    cluster.run(lambda: bool(pulls), 2)
    (pull,) = pulls
    assert isinstance(pull, do.Pull)
    ends: list[on.Pulled] = []
    feed = decode.feed

    def hear(event: on.Event) -> None:
        if isinstance(event, on.Pulled) and event.key == pull.key:
            ends.append(event)
        feed(event)

    decode.feed = hear  # type: ignore[method-assign]
    cluster.run(lambda: cluster.snapshot(uid).failures == 1, 5)
    others = [cluster.submit((n, *range(11)), 3) for n in range(6)]
    cluster.run(lambda: bool(ends), 8)
    assert prefill.machine.pool.generations(pull.source) != pull.generations
    assert [end.reason for end in ends] == ["generation"]
    cluster.run(cluster.ended(uid, *others), 20)
    assert_exact(cluster, uid, PROMPT, 10, failures=1)
    for n, other in enumerate(others):
        assert_exact(cluster, other, (n, *range(11)), 3)
    come_to_rest(cluster)


def test_a_transfer_that_lands_after_decode_gave_up_changes_no_other_answer() -> None:
    cluster = Cluster(num_blocks=4)
    decode = cluster.runners["d0"]
    take_longer(decode, "step", 0.5)
    pulls = take_longer(decode, "pull", 3.0, how_often=1)
    given_up = cluster.submit(PROMPT, 10)  # all four blocks
    cluster.run(lambda: bool(pulls), 2)
    cluster.ledger.execute(Abort(given_up, "test"))
    canary = cluster.submit(CANARY, 10)
    cluster.run(cluster.ended(canary), 30)
    assert_exact(cluster, canary, CANARY, 10)
    come_to_rest(cluster)


# strangers and dead peers


def test_twenty_pulls_for_leases_that_nobody_knows_are_refused_at_once_and_good_traffic_goes_on() -> None:
    cluster = Cluster()
    decode = cluster.runners["d0"]
    pulls = take_longer(decode, "pull", 0.1)
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(lambda: bool(pulls), 2)
    commit = next(message for message in cluster.sent if isinstance(message, Commit))
    replies: list[object] = []
    for number in range(20):
        cluster.replies[f"stranger{number}"] = replies.append
        stranger = commit.model_copy(update={"lease_id": f"lease{number}", "uid": f"uid{number}"})
        decode.feed(on.Called(f"stranger{number}", stranger))
    assert len(replies) == decode.machine.refusals["unknown_attempt"] == 20
    cluster.run(cluster.ended(uid), 1)
    assert_exact(cluster, uid, PROMPT, 10)
    assert len(pulls) == 1
    come_to_rest(cluster)


def test_a_prefill_node_that_decode_cannot_reach_costs_its_own_requests_only_and_is_used_again() -> None:
    cluster = Cluster(prefill=2, num_blocks=64)
    cluster.run(limit_s=1)
    deliver = cluster.deliver
    cut_off(cluster, "d0", "p0")
    take_longer(cluster.runners["d0"], "step", 0.4)  # it decodes for others while its grant to p0 goes unanswered
    uids = {cluster.submit((n, 2, 3), 10, max_attempts=1): n for n in range(8)}
    cluster.run(cluster.ended(*uids), 10)
    by_node: dict[str, list[str]] = {"p0": [], "p1": []}
    for uid in uids:
        by_node[cluster.snapshot(uid).prefill_node].append(uid)
    assert all(by_node.values())
    assert {cluster.snapshot(uid).error_code for uid in by_node["p0"]} == {"grant_unacknowledged"}
    for uid in by_node["p1"]:
        assert_exact(cluster, uid, (uids[uid], 2, 3), 10)
    come_to_rest(cluster)
    cluster.deliver = deliver  # type: ignore[method-assign]
    cluster.lose_message = lambda message: False
    cluster.runners["p1"].feed(on.DrainAsked())
    cluster.run(limit_s=8)  # they are kept apart for so long at most
    expect_exact(cluster, PROMPT)


def test_a_dead_decode_node_does_not_hold_up_what_goes_to_the_others() -> None:
    cluster = Cluster(decode=2, num_blocks=64)
    cluster.run(limit_s=1)
    cut_off(cluster, "p0", "d0")
    prompts = [(n, 2, 3) for n in range(8)]
    uids = [cluster.submit(prompt, 6) for prompt in prompts]
    cluster.run(limit_s=1)  # prefill waits for d0's acknowledgement for two
    states = {"d0": set[str](), "d1": set[str]()}
    for uid in uids:
        record = cluster.snapshot(uid)
        states[record.decode_node].add(record.state)
    assert states == {"d0": {"PREFILLING"}, "d1": {"FINISHED"}}
    cluster.run(cluster.ended(*uids), 20)
    for uid, prompt in zip(uids, prompts, strict=True):
        assert_exact(cluster, uid, prompt, 6, failures=cluster.snapshot(uid).failures)


# starts and ends


@pytest.mark.parametrize("order", [*itertools.permutations(["prefill", "decode", "request"])], ids=",".join)
def test_nodes_and_requests_may_come_in_any_order(order: tuple[str, ...]) -> None:
    cluster = Cluster(prefill=0, decode=0)
    uids: list[str] = []
    for what in order:
        if what == "request":
            uids.append(cluster.submit(PROMPT, 10, max_attempts=1))
        else:
            cluster._add(what, what, 16, 8)
        cluster.run(limit_s=3)
    cluster.run(cluster.ended(*uids), 5)
    assert_exact(cluster, uids[0], PROMPT, 10)
    come_to_rest(cluster)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_node_that_is_stopped_in_the_middle_of_a_transfer_finishes_it_and_is_empty_then(name: str) -> None:
    cluster = Cluster()
    pulls = take_longer(cluster.runners["d0"], "pull", 1.5)
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(lambda: bool(pulls), 2)
    machine = cluster.runners[name].machine
    cluster.runners[name].feed(on.DrainAsked())
    cluster.run(limit_s=1)
    assert not machine.idle
    cluster.run(cluster.ended(uid), 2)
    record = cluster.snapshot(uid)
    assert record.attempt == 1
    assert_exact(cluster, uid, PROMPT, 10)
    cluster.run(lambda: machine.idle and machine.pool.free == machine.pool.num_blocks, 1)


# locks, queues and flushed data


def test_a_request_that_nobody_was_rung_for_runs_and_its_id_is_free_after_it() -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: True
    first = cluster.submit(PROMPT, 10, client="mine")  # web died before it rang; another process watches
    cluster.lose_bell = lambda bell: False
    cluster.run(cluster.ended(first), 4)
    assert_exact(cluster, first, PROMPT, 10)
    second = cluster.submit((77, 78), 10, client="mine")
    cluster.run(cluster.ended(second), 4)
    assert_exact(cluster, second, (77, 78), 10)


def test_the_id_of_a_request_whose_web_process_died_before_it_rang_is_free() -> None:
    cluster = Cluster(prefill=0, decode=0)

    def admit(uid: str, web: str) -> AdmitStatus:
        sampling = SamplingParams(temperature=0, seed=1, max_tokens=2)
        answer = cluster.ledger.execute(Admit(uid, "mine", PROMPT, sampling, Watcher(web, "c"), LIMITS))
        return AdmitStatus(answer.status)

    cluster.ledger.execute(Register(NodeInfo(incarnation="w2", role="web", name="w2", pid=1, host="h"), 10_000_000))
    assert admit("first", "w") is AdmitStatus.ADMITTED
    assert admit("second", "w2") is AdmitStatus.DUPLICATE
    cluster.ledger.execute(ReportExit("w"))
    assert admit("third", "w2") is AdmitStatus.ADMITTED


def test_after_the_ledger_was_flushed_blocks_come_back_and_the_next_request_works() -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    prompt = tuple(range(1, 9))
    for _ in range(3):
        cluster.submit(prompt, 50)
    cluster.run(lambda: bool(cluster.runners["d0"].sequences), 2)
    cluster.ledger.restore(Store(wall=0))
    cluster.ledger.execute(Register(NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h"), 10_000_000))
    come_to_rest(cluster, within_s=3)
    expect_exact(cluster, PROMPT)


# words that did not come or came too often


def test_words_about_a_handoff_that_is_over_change_nothing() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 10)
    cluster.run(cluster.ended(uid), 5)
    come_to_rest(cluster)
    said = list(cluster.sent)
    assert {type(message) for message in said} == {Grant, Commit, PullResult}
    for message in said:
        name = "d0" if isinstance(message, Commit) else "p0"
        cluster.replies["again"] = lambda reply: None
        cluster.runners[name].feed(on.Called("again", message))
    asked: list[str] = []

    def hear(command: Command) -> str:
        asked.append(command.name)
        return ""

    cluster.ledger_fault = hear
    cluster.run(limit_s=3)
    assert not {"emit", "activate", "fail_attempt"} & set(asked)
    assert cluster.runners["p0"].machine.refusals == {"unknown_attempt": 2}
    assert cluster.runners["d0"].machine.refusals == {"unknown_attempt": 1}
    come_to_rest(cluster)
