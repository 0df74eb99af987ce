"""What the ledger lost or did not take is said again; what it holds instead is never spliced; the end comes at once."""

from __future__ import annotations

from app.ledger.memory.state import Store
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Activate, ActivateAnswer, ActivateStatus, Emit
from tests.unit.protocol.cluster import Cluster, Runner, reference

PROMPT = next((n, 3) for n in range(1, 200) if len(reference((n, 3), 30)) == 30)
ANSWER = reference(PROMPT, 30)


def rolled_back(cluster: Cluster, uid: str) -> None:
    """The ledger has lost the last few tokens of a running answer."""
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 5)
    saved: Store = cluster.ledger.save()
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 10)
    cluster.ledger.restore(saved)


def test_tokens_that_a_rollback_lost_are_told_again() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 30)
    rolled_back(cluster, uid)
    cluster.run(cluster.ended(uid), 10)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 1, ANSWER)


def test_an_answer_whose_ledger_holds_other_tokens_ends_in_an_error() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 30)
    rolled_back(cluster, uid)
    record = cluster.ledger.store.records[uid]
    others = [*record.tokens, *(token + 1 for token in ANSWER[len(record.tokens) : 12])]
    record.tokens[:] = others
    cluster.run(cluster.ended(uid), 10)
    snapshot = cluster.snapshot(uid)
    assert (snapshot.state, snapshot.error_code, snapshot.attempt) == ("FAILED", "different_tokens", 1)
    assert list(snapshot.output_ids) == others


def test_a_first_token_whose_emission_was_lost_is_written_by_the_activation() -> None:
    cluster = Cluster()
    cluster.ledger_fault = lambda command: "lost" if isinstance(command, Emit) and command.incarnation == "p0" else ""
    uid = cluster.submit(PROMPT, 30)
    cluster.run(cluster.ended(uid), 10)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 1, ANSWER)


def test_a_call_that_came_late_has_changed_nothing_and_is_made_again() -> None:
    cluster = Cluster()
    ask = cluster.ask
    late: list[do.Ask] = []

    def once_late(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, Activate) and not late:
            late.append(question)
            answer = ActivateAnswer(ActivateStatus.LATE, cluster.ledger.time_ms())
            runner.feed(on.Answered(question.tag, answer))
        else:
            ask(runner, question)

    cluster.ask = once_late  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 30)
    cluster.run(cluster.ended(uid), 10)
    record = cluster.snapshot(uid)
    assert late
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 1, ANSWER)


def test_whoever_sees_the_last_token_sees_the_end() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 30)
    check = cluster.check

    def ended_with_it() -> None:
        check()
        record = cluster.snapshot(uid)
        assert len(record.output_ids) < 30 or record.state == "FINISHED"

    cluster.check = ended_with_it  # type: ignore[method-assign]
    cluster.run(cluster.ended(uid), 10)
    assert cluster.snapshot(uid).output_ids == ANSWER


def test_a_token_that_is_not_the_next_fails_the_attempt() -> None:
    cluster = Cluster()
    runner = cluster.runners["d0"]
    uid = cluster.submit(PROMPT, 30, max_attempts=1)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 5)
    (key,) = runner.sequences
    runner.feed(on.Stepped((on.Sample(key, 9, 1),)))
    cluster.run(cluster.ended(uid), 5)
    record = cluster.snapshot(uid)
    assert (record.state, record.error_code) == ("FAILED", "engine_error")
    assert record.output_ids == ANSWER[: len(record.output_ids)]
