"""What the machines make of what an engine says about one sequence."""

from __future__ import annotations

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Activate, FailAttempt
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


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_what_no_retry_heals_is_final_whichever_side_tells_the_ledger_first(delay_s: float) -> None:
    cluster = Cluster()
    ask = cluster.ask

    def spoil(runner: Runner, question: do.Ask) -> None:
        command = question.command
        if isinstance(command, Activate):  # the ledger holds another first token than prefill saw
            cluster.ledger.store.records[command.uid].tokens[0] += 1
        if isinstance(command, FailAttempt) and command.lease_id:
            cluster.after(delay_s, lambda: ask(runner, question))
        else:
            ask(runner, question)

    cluster.ask = spoil  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10)
    cluster.run(cluster.ended(uid), 20)
    cluster.run(cluster.at_baseline, 15)
    record = cluster.snapshot(uid)
    assert (record.state, record.error_code, record.attempt) == ("FAILED", "different_tokens", 1)
