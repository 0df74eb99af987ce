"""A message of an earlier attempt, or under another lease, is refused by name, counted, and changes nothing."""

from __future__ import annotations

import pytest

from app.protocol import events as on
from app.protocol.messages import Activating, Commit, Grant, Message, PullResult
from app.protocol.tables import FailureReason
from tests.unit.protocol.cluster import Cluster, reference
from tests.unit.protocol.rest import kinds

PROMPT = (5, 6, 7, 8, 9, 10)
OTHER = [
    ({"uid": "another"}, "unknown_attempt"),
    ({"attempt": 2}, "unknown_attempt"),
]
"""What may be wrong with any message, and the name of it."""


def tell(cluster: Cluster, name: str, message: Message) -> list[object]:
    """Hand a message to a node; returns the list into which its reply comes."""
    replies: list[object] = []
    cluster.replies["forged"] = replies.append
    cluster.runners[name].feed(on.Called("forged", message))
    return replies


def awaiting_commit(cluster: Cluster) -> Commit:
    """A decode node has granted; the COMMIT for it has not arrived, and is this one."""
    cluster.lose_message = lambda message: isinstance(message, Commit)
    cluster.submit(PROMPT, 10)
    cluster.run(lambda: any(isinstance(message, Commit) for message in cluster.sent), 5)
    return next(message for message in cluster.sent if isinstance(message, Commit))


def awaiting_result(cluster: Cluster) -> tuple[str, Commit]:
    """Prefill waits for what becomes of its COMMIT."""
    cluster.runners["d0"].pull = lambda job: None  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(lambda: any(isinstance(message, Commit) for message in cluster.sent), 5)
    cluster.run(limit_s=0.1)
    return uid, next(message for message in cluster.sent if isinstance(message, Commit))


@pytest.mark.parametrize(
    ("change", "reason"),
    [*OTHER, ({"fence": "another"}, "stale_fence"), ({"lease_id": "another"}, "unknown_attempt")],
)
def test_a_stale_commit_starts_no_pull(change: dict[str, object], reason: str) -> None:
    cluster = Cluster()
    commit = awaiting_commit(cluster)
    node = cluster.runners["d0"]
    pulls: list[object] = []
    node.pull = pulls.append  # type: ignore[method-assign, assignment]
    tell(cluster, "d0", commit.model_copy(update=change))
    cluster.run(limit_s=0.1)
    assert (node.machine.refusals, pulls) == ({reason: 1}, [])
    tell(cluster, "d0", commit)
    cluster.run(limit_s=0.1)
    assert len(pulls) == 1


def test_a_second_commit_for_a_lease_does_not_replace_the_first() -> None:
    cluster = Cluster()
    _, commit = awaiting_result(cluster)
    tell(cluster, "d0", commit.model_copy(update={"token": commit.token + 1}))
    assert cluster.runners["d0"].machine.refusals == {"wrong_phase": 1}
    assert cluster.runners["d0"].machine.table[commit.lease_id].commit == commit


@pytest.mark.parametrize("kind", [PullResult, Activating])
@pytest.mark.parametrize(
    ("change", "reason"),
    [*OTHER, ({"fence": "another"}, "unknown_attempt"), ({"lease_id": "another"}, "other_lease")],
)
def test_a_stale_word_about_a_pull_frees_nothing(kind: type, change: dict[str, object], reason: str) -> None:
    cluster = Cluster()
    uid, commit = awaiting_result(cluster)
    named = {"uid": uid, "attempt": 1, "fence": commit.fence, "lease_id": commit.lease_id} | change
    tell(cluster, "p0", kind(**named) if kind is Activating else PullResult(activated=True, **named))
    node = cluster.runners["p0"].machine
    assert (node.refusals, len(node.table)) == ({reason: 1}, 1)


def test_a_word_about_a_pull_before_there_was_a_commit_frees_nothing() -> None:
    cluster = Cluster()
    cluster.runners["p0"].seal = lambda job: None  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10)
    cluster.run(lambda: bool(cluster.sent), 5)
    (grant,) = cluster.sent
    cluster.run(limit_s=0.1)
    result = PullResult(uid=uid, attempt=1, fence=grant.fence, lease_id=grant.lease_id, activated=True)
    tell(cluster, "p0", result)
    node = cluster.runners["p0"].machine
    assert (node.refusals, len(node.table)) == ({"wrong_phase": 1}, 1)


def test_blocks_that_hold_other_tokens_than_the_ledger_are_never_decoded() -> None:
    """No command leads there; a ledger that lost writes in the middle may."""
    cluster = Cluster()
    _, commit = awaiting_result(cluster)
    started: list[object] = []
    cluster.runners["d0"].start = started.append  # type: ignore[method-assign, assignment]
    record = cluster.ledger.store.records[commit.uid]
    record.tokens.extend(reference(PROMPT, 10)[1:4])
    cluster.runners["d0"].feed(on.Pulled(commit.lease_id))
    cluster.run(limit_s=0.5)
    snapshot = cluster.snapshot(commit.uid)
    assert (started, snapshot.state, snapshot.error_code) == ([], "FAILED", FailureReason.PULL_FAILED)


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
