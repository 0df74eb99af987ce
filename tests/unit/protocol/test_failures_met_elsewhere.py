"""Failures that other systems hid, told late or told to one side only: the first one ends both sides, at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Command, Emit, Holdings, ReserveNext
from app.protocol.decode.lease import Lease, Phase
from app.protocol.messages import Commit, Grant, Message, PullResult
from app.protocol.tables import LeaseState
from app.schemas import KVLocation
from tests.unit.protocol.cluster import Cluster, Runner
from tests.unit.protocol.rest import assert_exact, come_to_rest, expect_exact, leases_in, take_longer

PROMPT = (5, 6, 7, 8, 9, 10)
ERROR = "the engine cannot compute this sequence"


def fail_in_the_engine(runner: Runner, fails: Callable[[do.Start], bool], *, retry_helps: bool = True) -> None:
    """After 50 ms of computing the engine gives up each sequence for which ``fails``."""
    step = runner.step

    def broken() -> None:
        doomed = [key for key, running in runner.sequences.items() if fails(running.job)]
        for key in doomed:
            index = len(runner.sequences.pop(key).job.work.output_ids)
            sample = on.Sample(key, index, on.NO_TOKEN, error=ERROR, retry_helps=retry_helps)
            runner.feed(on.Stepped((sample,)))
        step()

    runner.step = lambda: runner.cluster.after(0.05, broken)  # type: ignore[method-assign]


def has_failed(cluster: Cluster, uid: str) -> bool:
    return cluster.snapshot(uid).failures == 1


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_prefill_that_fails_while_decode_waits_ends_both_sides_a_hundred_times(attempts: int) -> None:
    cluster = Cluster()
    fail_in_the_engine(cluster.runners["p0"], lambda job: job.work.attempt == 1)
    for number in range(100):
        prompt = (*PROMPT, number)
        uid = cluster.submit(prompt, 3, max_attempts=attempts)
        cluster.run(lambda: bool(leases_in(cluster, Phase.GRANTED)), 2)
        cluster.run(partial(has_failed, cluster, uid), 0.5)
        if attempts == 1:
            record = cluster.snapshot(uid)
            assert (record.state, record.error_code, record.error_detail) == ("FAILED", "engine_error", ERROR)
        else:
            cluster.run(cluster.ended(uid), 2)
            assert_exact(cluster, uid, prompt, 3, failures=1)
        come_to_rest(cluster)


def test_a_prompt_that_prefill_refuses_after_decode_has_admitted_it_never_reaches_decodes_engine() -> None:
    cluster = Cluster()
    fail_in_the_engine(cluster.runners["p0"], lambda job: True, retry_helps=False)
    started: list[object] = []
    cluster.runners["d0"].start = started.append  # type: ignore[method-assign, assignment]
    uid = cluster.submit(PROMPT, 10)
    cluster.run(lambda: bool(leases_in(cluster, Phase.GRANTED)), 2)
    (lease,) = leases_in(cluster, Phase.GRANTED)
    cluster.run(cluster.ended(uid), 0.5)
    record = cluster.snapshot(uid)
    assert (record.state, record.error_code, record.attempt, record.output_ids) == ("FAILED", "engine_error", 1, ())
    assert cluster.ledger.store.leases[lease.lease_id].state is LeaseState.CANCELLED
    come_to_rest(cluster)
    assert started == []


def with_less(message: Message) -> Message:
    """A COMMIT that names one generation too few."""
    if not isinstance(message, Commit):
        return message
    return message.model_copy(update={"generations": message.generations[:-1]})


def change_commits(cluster: Cluster) -> None:
    deliver = cluster.deliver
    cluster.deliver = lambda sender, call: deliver(  # type: ignore[method-assign]
        sender, replace(call, message=with_less(call.message))
    )


@pytest.mark.parametrize(("refused", "code"), [("commit", "commit_refused"), ("pull", "pull_failed")])
def test_a_refusal_of_decode_reaches_prefill_and_frees_its_blocks_at_once(refused: str, code: str) -> None:
    cluster = Cluster()
    decode, prefill = cluster.runners["d0"], cluster.runners["p0"].machine
    if refused == "commit":
        change_commits(cluster)
    else:
        decode.pull = lambda job: decode.feed(on.Pulled(job.key, "digest"))  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(cluster.ended(uid), 0.5)
    assert cluster.snapshot(uid).error_code == code
    cluster.run(lambda: prefill.pool.free == prefill.pool.num_blocks, 0.5)
    come_to_rest(cluster)


def test_a_refusal_that_is_lost_frees_every_block_once() -> None:
    cluster = Cluster()  # it checks all sums after each happening
    change_commits(cluster)
    cluster.lose_reply = lambda message: isinstance(message, Commit)
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(cluster.ended(uid), 2.5)
    assert cluster.snapshot(uid).error_code == "commit_unacknowledged"
    assert cluster.runners["d0"].machine.refusals == {"block_count": 1}
    come_to_rest(cluster)


@pytest.mark.parametrize(
    ("replies", "messages"),
    [((Grant,), ()), ((Commit,), (PullResult,)), ((), (PullResult,)), ((PullResult,), ())],
    ids=["of a grant", "of a commit and of its pull", "of a pull", "of the word about a pull"],
)
def test_a_lost_acknowledgement_is_waited_for_within_its_bound(
    replies: tuple[type, ...], messages: tuple[type, ...]
) -> None:
    cluster = Cluster()
    cluster.lose_reply = lambda message: isinstance(message, replies)
    cluster.lose_message = lambda message: isinstance(message, messages)
    take_longer(cluster.runners["d0"], "step", 1.0)  # every deadline of the handoff passes meanwhile
    prefill = cluster.runners["p0"].machine
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(lambda: any(isinstance(message, Commit) for message in cluster.sent), 1)
    bound_s = prefill.config.link_timeout_s + prefill.config.pull_timeout_s(2)
    cluster.run(lambda: prefill.pool.free == prefill.pool.num_blocks, bound_s)
    cluster.run(cluster.ended(uid), 15)
    assert_exact(cluster, uid, PROMPT, 10)
    come_to_rest(cluster)


def test_a_reservation_whose_answer_never_came_does_not_stand_for_the_next_attempt() -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    first: list[str] = []

    def unanswered(command: Command) -> str:
        """The first reservation that gets a lease, and all its repeats."""
        if isinstance(command, ReserveNext) and not first and cluster.ledger.store.waiters:
            first.append(command.lease_id)
        return "unanswered" if isinstance(command, ReserveNext) and command.lease_id in first else ""

    cluster.ledger_fault = unanswered
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(lambda: any(isinstance(message, Commit) for message in cluster.sent), 10)
    lost = cluster.ledger.store.leases[first[0]]
    assert (lost.attempt, lost.state) == (1, LeaseState.CANCELLED)
    (grant,) = [message for message in cluster.sent if isinstance(message, Grant)]
    assert grant.attempt == 2
    late = grant.model_copy(update={"attempt": 1, "fence": lost.fence, "lease_id": first[0]})
    cluster.replies["late"] = lambda reply: None
    prefill = cluster.runners["p0"]
    prefill.feed(on.Called("late", late))  # it may hold the first attempt for a second yet: then the fence decides
    cluster.run(cluster.ended(uid), 5)
    assert_exact(cluster, uid, PROMPT, 10)
    assert [message.attempt for message in cluster.sent if isinstance(message, Commit)] == [2]
    come_to_rest(cluster)
    cluster.replies["later"] = lambda reply: None
    prefill.feed(on.Called("later", late))
    assert prefill.machine.refusals == {"unknown_attempt": 1}


def test_a_first_token_that_comes_after_its_lease_has_expired_is_refused_on_both_sides() -> None:
    cluster = Cluster()
    prefill, decode = cluster.runners["p0"], cluster.runners["d0"]
    take_longer(prefill, "step", 4.0)
    refused: list[str] = []
    ask = cluster.ask

    def deaf_prefill(runner: Runner, question: do.Ask) -> None:
        """It does not hear that the attempt is no longer its own, and so tries to emit its token."""
        if isinstance(question.command, Holdings) and runner is prefill:
            cluster.after(2.0, lambda: runner.feed(on.AskFailed(question.tag, "lost")))
            return
        if isinstance(question.command, Emit):
            refused.append(cluster.ledger.execute(question.command).status)
        ask(runner, question)

    cluster.ask = deaf_prefill  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10, max_attempts=1, first_token_timeout_ms=2000)
    cluster.run(lambda: bool(leases_in(cluster, Phase.GRANTED)), 1)
    (lease,) = leases_in(cluster, Phase.GRANTED)
    cluster.run(cluster.ended(uid), 3)
    record = cluster.snapshot(uid)
    assert (record.state, record.error_code, record.output_ids) == ("FAILED", "first_token_timeout", ())
    cluster.run(lambda: decode.machine.pool.free == 16, 1.5)
    cluster.run(lambda: prefill.machine.pool.free == 16, 3)
    assert refused == ["FENCED"]
    cluster.replies["late"] = lambda reply: None
    decode.feed(on.Called("late", commit_for(lease)))
    assert decode.machine.refusals == {"unknown_attempt": 1}
    assert cluster.ledger.store.leases[lease.lease_id].state is LeaseState.EXPIRED
    expect_exact(cluster, (77, 78))


def commit_for(lease: Lease) -> Commit:
    """What prefill would say if it did not know that the lease has ended."""
    location = KVLocation(pid=1, fd=1, incarnation="p0", num_blocks=16, block_bytes=1, layout="x")
    ids = {"uid": lease.uid, "attempt": lease.attempt, "fence": lease.fence, "lease_id": lease.lease_id}
    lists = {"blocks": (0, 1), "generations": (1, 1), "digests": ("0" * 32,) * 2}
    return Commit(**ids, **lists, index=0, token=1, num_tokens=6, location=location)


@pytest.mark.parametrize("broken", [(1,), (0, 2, 3)], ids=["one", "all but one"])
def test_of_a_batch_each_request_is_judged_alone(broken: tuple[int, ...]) -> None:
    cluster = Cluster(num_blocks=32)
    decode = cluster.runners["d0"]
    prompts = [(n + 11, 2, 3) for n in range(4)]
    uids = [cluster.submit(prompt, 12, max_attempts=1) for prompt in prompts]
    doomed = [uids[n] for n in broken]
    feed, spoiled = decode.feed, list[str]()

    def spoil(event: on.Event) -> None:
        """The first step that has all four gives up some of them, and tells of all in one word."""
        if isinstance(event, on.Stepped) and len(event.samples) == len(uids) and not spoiled:
            spoiled.extend(sample.key for sample in event.samples if _uid_of(decode, sample.key) in doomed)
            for key in spoiled:
                decode.sequences.pop(key)
            samples = (replace(one, token=-1, error=ERROR) if one.key in spoiled else one for one in event.samples)
            event = on.Stepped(tuple(samples))
        feed(event)

    decode.feed = spoil  # type: ignore[method-assign]
    cluster.run(cluster.ended(*uids), 10)
    come_to_rest(cluster)
    assert len(spoiled) == len(broken)
    for number, (uid, prompt) in enumerate(zip(uids, prompts, strict=True)):
        if number in broken:
            record = cluster.snapshot(uid)
            assert (record.state, record.error_code, record.error_detail) == ("FAILED", "engine_error", ERROR)
        else:
            assert_exact(cluster, uid, prompt, 12)


def _uid_of(runner: Runner, key: str) -> str:
    return str(runner.machine.table[key].uid)
