"""The handoff, machine against machine: what goes right, and each way in which it may go wrong."""

from __future__ import annotations

import pytest

from app.protocol.commands import Abort
from app.protocol.messages import Commit, Grant, PullResult
from tests.unit.protocol.cluster import EOS, Cluster, reference
from tests.unit.protocol.rest import finish, kinds

PROMPT = (5, 6, 7, 8, 9, 10)


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
