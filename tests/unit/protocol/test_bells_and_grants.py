"""How work comes to a node: by bells, by one question at a time, by ringing again; a grant may come early."""

from __future__ import annotations

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Bell, Claim
from tests.unit.protocol.cluster import Cluster, Runner, reference

PROMPT = (5, 6, 7, 8, 9, 10)


def test_decode_is_rung_for_again_after_1_2_4_and_then_every_4_seconds() -> None:
    cluster = Cluster(decode=0)
    cluster.run(limit_s=1)
    rung: list[float] = []

    def hear(bell: Bell) -> bool:
        if bell.queue == "decode":
            rung.append(cluster.now)
        return False

    cluster.lose_bell = hear
    cluster.submit(PROMPT, 10)
    cluster.run(limit_s=18)
    assert [round(at - rung[0]) for at in rung] == [0, 1, 3, 7, 11, 15]


def test_a_grant_that_overtakes_the_answer_to_our_claim_is_taken() -> None:
    cluster = Cluster()
    ask = cluster.ask

    def slowly(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, Claim):
            answer = cluster.ledger.execute(question.command)
            cluster.after(0.5, lambda: runner.feed(on.Answered(question.tag, answer)))
        else:
            ask(runner, question)

    cluster.ask = slowly  # type: ignore[method-assign, assignment]
    cluster.run(limit_s=1)
    uid = cluster.submit(PROMPT, 10)
    cluster.run(limit_s=0.05)
    cluster.runners["d0"].feed(on.BellRang("b", uid, 1))
    cluster.run(cluster.ended(uid), 5)
    record = cluster.snapshot(uid)
    assert (record.state, record.attempt, record.output_ids) == ("FINISHED", 1, reference(PROMPT, 10))
    assert [message.kind for message in cluster.sent] == ["grant", "commit", "pull_result"]


def test_two_bells_at_once_are_not_promised_the_same_blocks() -> None:
    cluster = Cluster(num_blocks=4)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: bell.queue == "prefill"
    uids = [cluster.submit((n, *range(11)), 3) for n in range(2)]  # three blocks each
    for uid in uids:
        cluster.runners["p0"].feed(on.BellRang(cluster.draw(), uid, 1))
    cluster.run(cluster.ended(*uids), 10)
    for n, uid in enumerate(uids):
        assert cluster.snapshot(uid).output_ids == reference((n, *range(11)), 3)
