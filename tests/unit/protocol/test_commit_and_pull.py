"""COMMIT and the pull: nothing is activated but exactly what was sealed."""

from __future__ import annotations

from dataclasses import replace

from app.protocol import effects as do
from app.protocol.messages import Commit
from tests.unit.protocol.cluster import Cluster, reference
from tests.unit.protocol.rest import finish

PROMPT = (5, 6, 7, 8, 9, 10)


def test_a_commit_with_unequal_lists_is_refused() -> None:
    cluster = Cluster()
    spoil = iter([True])
    deliver = cluster.deliver

    def cut(sender: object, call: object) -> None:
        message = call.message  # type: ignore[attr-defined]
        if isinstance(message, Commit) and next(spoil, False):
            call = replace(call, message=message.model_copy(update={"generations": message.generations[:-1]}))  # type: ignore[type-var]
        deliver(sender, call)  # type: ignore[arg-type]

    cluster.deliver = cut  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    assert cluster.runners["d0"].machine.refusals == {"block_count": 1}
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(PROMPT, 10)
    assert record.failures == 1


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


def test_corrupted_kv_is_caught_and_the_attempt_retried() -> None:
    cluster = Cluster()
    original = cluster.runners["p0"].seal
    spoiled = iter([True])

    def spoil(job: object) -> None:
        original(job)  # type: ignore[arg-type]
        if next(spoiled, False):
            cluster.runners["p0"].memory[job.blocks[0]][0] ^= 1  # type: ignore[attr-defined]

    cluster.runners["p0"].seal = spoil  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    record = cluster.snapshot(uid)
    assert record.output_ids == reference(PROMPT, 10)
    assert record.failures == 1
