"""Rule 3: what a node holds and what the ledger gives it are compared, calls that are in flight aside."""

from __future__ import annotations

from collections.abc import Callable

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Abort, Claim, Command, Holdings
from tests.unit.protocol.cluster import TICK, Cluster, Runner, reference
from tests.unit.protocol.rest import finish, kinds

PROMPT = (5, 6, 7, 8, 9, 10)


def answer_slowly(
    cluster: Cluster, kind: type, seconds: float, applied: Callable[[Command], None] = lambda command: None
) -> None:
    """Questions of p0 of this kind reach the ledger at once; what it says takes ``seconds``."""
    ask = cluster.ask

    def slowly(runner: Runner, question: do.Ask) -> None:
        if not isinstance(question.command, kind) or runner.incarnation != "p0":
            ask(runner, question)
            return
        answer = cluster.ledger.execute(question.command)
        applied(question.command)
        cluster.after(seconds, lambda: runner.feed(on.Answered(question.tag, answer)))

    cluster.ask = slowly  # type: ignore[method-assign]


def undisturbed(cluster: Cluster, uid: str) -> None:
    """It ended well in its first attempt."""
    cluster.run(cluster.ended(uid), 30)
    cluster.run(cluster.at_baseline, 5)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 1, reference(PROMPT, 10))


def test_what_came_after_the_read_is_not_let_go_by_its_late_answer() -> None:
    cluster = Cluster(decode=0)
    uids: list[str] = []

    def claimed_right_after(command: Command) -> None:
        if not uids and cluster.now > 1:
            uids.append(cluster.submit(PROMPT, 10))

    answer_slowly(cluster, Holdings, 0.8, claimed_right_after)
    cluster.run(lambda: bool(uids), 5)
    cluster.run(limit_s=1)
    assert {attempt.uid for attempt in cluster.runners["p0"].machine.table.values()} == set(uids)
    cluster._add("decode", "d0", 16, 8)
    undisturbed(cluster, uids[0])


def test_a_claim_whose_answer_is_on_its_way_is_not_handed_back() -> None:
    cluster = Cluster(decode=0)
    cluster.run(limit_s=1)
    answer_slowly(cluster, Claim, 3.5)
    uid = cluster.submit(PROMPT, 10)
    cluster.run(limit_s=4)
    cluster._add("decode", "d0", 16, 8)
    undisturbed(cluster, uid)


def test_a_claim_that_was_sent_after_the_read_and_came_before_it_is_not_handed_back() -> None:
    cluster = Cluster()
    answer_slowly(cluster, Claim, 0.8)
    ask = cluster.ask
    uids: list[str] = []

    def overtaken(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, Holdings) and runner.incarnation == "p0" and cluster.now > 1 and not uids:
            uids.append(cluster.submit(PROMPT, 10))
            cluster.after(20 * TICK, lambda: ask(runner, question))
        else:
            ask(runner, question)

    cluster.ask = overtaken  # type: ignore[method-assign]
    cluster.run(lambda: bool(uids), 5)
    undisturbed(cluster, uids[0])


def test_a_claim_that_was_applied_late_is_handed_back_though_nobody_asks_for_it() -> None:
    cluster = Cluster(decode=0)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: True
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.ledger.execute(Claim(uid, "p0", "fence of a call that was given up", 16, 4))
    cluster.run(lambda: cluster.snapshot(uid).attempt == 2, 2.1)
    assert cluster.snapshot(uid).failures == 0


def test_what_the_ledger_took_away_is_let_go_within_a_second() -> None:
    cluster = Cluster(decode=0)
    uid = cluster.submit(PROMPT, 10)
    cluster.run(limit_s=2)
    assert len(cluster.runners["p0"].machine.table) == 1
    cluster.ledger.execute(Abort(uid, "test"))
    cluster.run(cluster.at_baseline, 1.1)


def test_a_ledger_that_restarted_is_compared_with_at_once() -> None:
    cluster = Cluster(decode=0)
    asked: list[float] = []
    uid = cluster.submit(PROMPT, 10)
    cluster.run(limit_s=2)

    def notice(command: Command) -> str:
        if isinstance(command, Holdings):
            asked.append(cluster.now)
        return ""

    cluster.ledger_fault = notice
    cluster.run(lambda: bool(asked), 2)
    cluster.run(limit_s=0.1)
    cluster.ledger.execute(Abort(uid, "test"))
    cluster.runners["p0"].feed(on.LedgerRestarted())
    cluster.run(limit_s=0.1)
    assert cluster.at_baseline()


def test_a_node_that_the_ledger_does_not_know_lets_go_before_it_registers() -> None:
    cluster = Cluster()
    runner = cluster.runners["d0"]
    uid = cluster.submit(tuple(range(1, 9)), 50)
    cluster.run(lambda: bool(runner.sequences), 5)
    held_then: list[int] = []
    register = cluster.register

    def watched(registering: Runner) -> None:
        held_then.append(len(registering.machine.table) + len(registering.sequences))
        register(registering)

    cluster.register = watched  # type: ignore[method-assign, assignment]
    runner.feed(on.RegistrationLost())
    cluster.run(lambda: bool(held_then), 5)
    assert held_then == [0]
    cluster.run(cluster.ended(uid), 30)
    assert cluster.snapshot(uid).output_ids == reference(tuple(range(1, 9)), 50)


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


def test_a_node_that_was_declared_dead_lets_go_and_comes_back() -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 10)
    finish(cluster, uid)
    runner = cluster.runners["d0"]
    runner.node.on_registration_lost = lambda: None  # type: ignore[method-assign]  # the comparison is what tells it
    runner.freeze()  # silent for longer than its TTL, with nothing in its table
    cluster.run(limit_s=8)
    runner.thaw()
    again = cluster.submit((9, 9, 9), 10)
    finish(cluster, again)
    assert cluster.snapshot(again).output_ids == reference((9, 9, 9), 10)


def test_a_lost_registration_with_a_stuck_mover_waits_in_one_timer() -> None:
    cluster = Cluster()
    runner = cluster.runners["d0"]
    runner.pull = lambda job: None  # type: ignore[method-assign]
    cluster.submit(PROMPT, 10)
    cluster.run(lambda: "commit" in kinds(cluster), 5)
    for _ in range(50):
        runner.feed(on.RegistrationLost())
        cluster.run(limit_s=0.05)
    assert len(runner.machine._timers) < 10


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
