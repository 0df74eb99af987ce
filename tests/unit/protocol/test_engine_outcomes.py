"""What the machines make of what an engine says about one sequence."""

from __future__ import annotations

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from tests.unit.protocol.cluster import Cluster, Runner, reference

PROMPT = (5, 6, 7, 8, 9, 10)


def says(runner: Runner, sample: on.Sample) -> None:
    """Its engine answers the next sequence that starts with ``sample``, and computes nothing."""
    start, once = runner.start, iter([True])

    def answer(job: do.Start) -> None:
        if next(once, False):
            runner.cluster.after(0.01, lambda: runner.feed(on.Stepped((_of(job, sample),))))
        else:
            start(job)

    runner.start = answer  # type: ignore[method-assign]


def _of(job: do.Start, sample: on.Sample) -> on.Sample:
    index = len(job.work.output_ids)
    return on.Sample(job.key, index, sample.token, sample.finish_reason, sample.error, sample.retry_helps)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_an_answer_that_had_ended_already_ends_without_another_token(name: str) -> None:
    cluster = Cluster()
    says(cluster.runners[name], on.Sample("", 0, on.NO_TOKEN, "stop"))
    uid = cluster.submit(PROMPT, 10)
    cluster.run(cluster.ended(uid))
    cluster.run(cluster.at_baseline, 15)
    record = cluster.snapshot(uid)
    before = () if name == "p0" else reference(PROMPT, 1)
    assert (record.state, record.finish_reason, record.output_ids) == ("FINISHED", "stop", before)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_an_error_that_a_retry_may_heal_is_retried(name: str) -> None:
    cluster = Cluster()
    says(cluster.runners[name], on.Sample("", 0, on.NO_TOKEN, error="not a number"))
    uid = cluster.submit(PROMPT, 10)
    cluster.run(cluster.ended(uid))
    record = cluster.snapshot(uid)
    assert (record.state, record.failures, record.output_ids) == ("FINISHED", 1, reference(PROMPT, 10))


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_an_error_that_no_retry_heals_ends_the_request_at_once(name: str) -> None:
    cluster = Cluster()
    says(cluster.runners[name], on.Sample("", 0, on.NO_TOKEN, error="longer than the model", retry_helps=False))
    uid = cluster.submit(PROMPT, 10)
    cluster.run(cluster.ended(uid))
    cluster.run(cluster.at_baseline, 15)
    record = cluster.snapshot(uid)
    assert (record.state, record.error_code, record.failures) == ("FAILED", "engine_error", 0)
    assert record.error_detail == "longer than the model"
