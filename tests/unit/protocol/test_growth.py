"""A lease grows with its answer; where no block is free the youngest gives way, and the oldest always goes on."""

from __future__ import annotations

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Abort, Emit, FailAttempt, ReserveNext
from app.protocol.commands import Cluster as AskCluster
from app.protocol.decode import Phase
from tests.unit.protocol.cluster import Cluster, Runner, reference
from tests.unit.protocol.rest import answer_late, assert_exact, finish

LONG = 40
PROMPTS = [prompt for n in range(1, 400) if len(reference(prompt := (n, 3, 4, 5), LONG)) == LONG]
"""Four tokens and an answer of forty: eleven blocks at its end, two at its beginning."""


def preempted(runner: Runner) -> list[str]:
    """Uids, in order."""
    return [log.uid for log in runner.log if log.fields.get("reason") == "preempted"]


def held(cluster: Cluster, uid: str, node: str = "d0") -> int:
    """Blocks of its lease on the node."""
    table = cluster.runners[node].machine.table.values()
    return sum(len(lease.blocks) for lease in table if lease.uid == uid)


def submit_in_order(cluster: Cluster, count: int, max_tokens: int = LONG) -> list[str]:
    """Requests, each in the engine of a decode node before the next one comes."""
    uids: list[str] = []
    for prompt in PROMPTS[:count]:
        uid = cluster.submit(prompt, max_tokens)
        cluster.run(lambda uid=uid: cluster.snapshot(uid).state == "DECODING")  # type: ignore[misc]
        uids.append(uid)
    return uids


def test_a_lease_begins_small_and_grows_with_its_answer() -> None:
    cluster = Cluster(num_blocks=16)
    (uid,) = submit_in_order(cluster, 1)
    sizes = [held(cluster, uid)]
    while not cluster.ended(uid)():
        cluster.run(limit_s=0.01)
        sizes.append(held(cluster, uid) or sizes[-1])
    assert sizes == sorted(sizes)
    assert sorted(set(sizes)) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert_exact(cluster, uid, PROMPTS[0], LONG)


def test_a_growing_sequence_never_leaves_out_a_step_while_a_block_is_free() -> None:
    cluster = Cluster(num_blocks=16)
    (uid,) = submit_in_order(cluster, 1)
    began, had = cluster.now, len(cluster.snapshot(uid).output_ids)
    finish(cluster, uid)
    assert cluster.now - began < (LONG - had + 2) * 0.01 + 0.05


def test_the_ledger_is_told_how_far_a_lease_has_grown() -> None:
    cluster = Cluster(num_blocks=16)
    (uid,) = submit_in_order(cluster, 1)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) == 30)
    cluster.run(limit_s=0.005)
    (lease,) = cluster.ledger.execute(AskCluster()).leases
    assert (lease.uid, lease.blocks) == (uid, held(cluster, uid))
    assert lease.blocks > 8


def test_where_no_block_is_free_the_youngest_gives_way_and_its_answer_goes_on_token_exactly() -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    cluster.run(cluster.ended(old, young))
    assert preempted(cluster.runners["d0"]) == [young], "once: it came back when the older one had ended"
    assert [cluster.snapshot(uid).attempt for uid in (old, young)] == [1, 2]
    for uid, prompt in zip((old, young), PROMPTS, strict=False):
        assert_exact(cluster, uid, prompt, LONG)
    cluster.run(cluster.at_baseline, 1)


def test_who_is_young_is_a_matter_of_admission_not_of_arrival() -> None:
    cluster = Cluster(num_blocks=16)
    cluster.run(limit_s=1)
    cluster.lose_bell = lambda bell: bell.queue == "prefill"
    old, young = (cluster.submit(prompt, LONG) for prompt in PROMPTS[:2])
    for uid in (young, old):
        cluster.runners["p0"].feed(on.BellRang(cluster.draw(), uid, 1))
        cluster.run(lambda uid=uid: cluster.snapshot(uid).state == "DECODING", 10)  # type: ignore[misc]
    cluster.run(cluster.ended(old, young))
    assert set(preempted(cluster.runners["d0"])) == {young}
    for uid, prompt in zip((old, young), PROMPTS, strict=False):
        assert_exact(cluster, uid, prompt, LONG)


def test_the_answer_goes_on_where_there_is_room() -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    cluster._add("decode", "d1", 16, 8)
    node, stops = cluster.runners["d0"], []
    stop = node.stop
    node.stop = stops.append  # type: ignore[method-assign]
    cluster.run(cluster.ended(young), 3)
    assert cluster.snapshot(young).decode_node == "d1"
    assert held(cluster, old) == 8, "nobody had to wait for it"
    assert_exact(cluster, young, PROMPTS[1], LONG)
    for job in stops:
        stop(job)
    finish(cluster, old)
    assert_exact(cluster, old, PROMPTS[0], LONG)


def test_blocks_of_the_preempted_are_free_only_when_the_engine_has_let_it_go() -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    node, stops = cluster.runners["d0"], []
    stop = node.stop
    node.stop = stops.append  # type: ignore[method-assign]
    cluster.run(lambda: bool(stops))
    cluster.run(limit_s=1)
    assert cluster.snapshot(young).attempt == 2, "the ledger knows"
    pool = node.machine.pool
    assert (pool.free, held(cluster, old), held(cluster, young)) == (0, 8, 8)
    assert pool.counts()["in_step"] == 16
    for job in stops:
        stop(job)
    node.stop = stop  # type: ignore[method-assign]
    cluster.run(cluster.ended(old, young))
    for uid, prompt in zip((old, young), PROMPTS, strict=False):
        assert_exact(cluster, uid, prompt, LONG)


def test_no_step_runs_without_room() -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    node = cluster.runners["d0"]
    node.stop = lambda job: None  # type: ignore[method-assign]
    cluster.run(lambda: cluster.snapshot(young).attempt == 2)
    cluster.run(limit_s=1)
    lease = next(lease for lease in node.machine.table.values() if lease.uid == old)
    written = 4 + len(lease.output) - 1
    assert written == 4 * len(lease.blocks), "its blocks are full, and it waits"
    assert node.sequences[lease.lease_id].num_computed == written


def test_a_lease_that_waits_for_its_kv_gives_way_too() -> None:
    cluster = Cluster(num_blocks=12)
    (old,) = submit_in_order(cluster, 1)
    cluster.lose_message = lambda message: message.kind == "commit"
    young = cluster.submit(PROMPTS[1] * 6, 4)  # seven blocks
    cluster.run(lambda: held(cluster, young) == 7)
    assert all(
        lease.phase is not Phase.RUNNING for lease in cluster.runners["d0"].machine.table.values() if lease.uid == young
    )
    cluster.run(lambda: preempted(cluster.runners["d0"]) == [young], 1.5)
    cluster.lose_message = lambda message: False
    cluster.run(cluster.ended(old, young))
    assert cluster.snapshot(old).attempt == 1
    assert_exact(cluster, young, PROMPTS[1] * 6, 4)


def test_a_new_lease_leaves_a_block_for_each_that_still_grows() -> None:
    cluster = Cluster(num_blocks=16)
    submit_in_order(cluster, 3)
    asked: list[int] = []
    ask = cluster.ask

    def listen(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, ReserveNext):
            asked.append(question.command.free_blocks - runner.machine.pool.free)
        ask(runner, question)

    cluster.ask = listen  # type: ignore[method-assign]
    cluster.submit(PROMPTS[3], LONG)
    cluster.run(lambda: bool(asked), 1)
    assert asked[0] == -3


def test_a_sequence_that_is_as_large_as_it_gets_needs_no_block_in_reserve() -> None:
    cluster = Cluster(num_blocks=16)
    (uid,) = submit_in_order(cluster, 1)
    machine = cluster.runners["d0"].machine
    rooms = []
    while held(cluster, uid):
        rooms.append((held(cluster, uid), machine._room()))
        cluster.run(limit_s=0.01)
    assert set(rooms) == {(blocks, 16 - blocks - (blocks < 11)) for blocks in range(2, 12)}


def test_what_was_promised_to_a_waiter_goes_to_who_needs_it_meanwhile() -> None:
    cluster = Cluster(num_blocks=12)
    (old,) = submit_in_order(cluster, 1)
    answer_late(cluster, 0.25, ReserveNext)
    prompt = PROMPTS[1] * 5  # six blocks
    young = cluster.submit(prompt, 12, max_attempts=1)
    cluster.run(lambda: young in preempted(cluster.runners["d0"]), 0.5)
    assert held(cluster, young) == 0, "there was nothing to give it"
    cluster.run(cluster.ended(old, young))
    assert cluster.snapshot(old).attempt == 1
    assert_exact(cluster, young, prompt, 12)
    assert_exact(cluster, old, PROMPTS[0], LONG)
    cluster.run(cluster.at_baseline, 2)


def test_the_only_sequence_of_a_node_is_never_preempted() -> None:
    cluster = Cluster(num_blocks=11)
    (only,) = submit_in_order(cluster, 1)
    others = [cluster.submit(prompt, LONG) for prompt in PROMPTS[1:4]]
    cluster.run(cluster.ended(only))
    assert only not in preempted(cluster.runners["d0"])
    assert cluster.snapshot(only).attempt == 1
    cluster.run(cluster.ended(*others))


@pytest.mark.parametrize(("decode", "num_blocks"), [(1, 11), (1, 13), (2, 12), (2, 14)])
def test_many_that_do_not_fit_together_all_finish_and_nobody_goes_in_circles(decode: int, num_blocks: int) -> None:
    cluster = Cluster(decode=decode, num_blocks=num_blocks)
    cluster.run(limit_s=1)
    uids = [cluster.submit(prompt, LONG, max_attempts=1, first_token_timeout_ms=600_000) for prompt in PROMPTS[:12]]
    cluster.run(cluster.ended(*uids), 60)
    for uid, prompt in zip(uids, PROMPTS, strict=False):
        assert_exact(cluster, uid, prompt, LONG)
    again = [cluster.snapshot(uid).attempt - 1 for uid in uids]
    assert sum(again), "nobody was preempted: this says nothing"
    assert again[0] == 0, "the oldest of all goes on from its beginning to its end"
    assert sum(again) <= 12 * LONG / 4, "each was paid for with a block that was filled"
    cluster.run(cluster.at_baseline, 5)


def test_a_preempted_request_comes_before_those_that_came_later() -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    cluster.run(lambda: preempted(cluster.runners["d0"]) == [young])
    later = [cluster.submit(prompt, LONG, first_token_timeout_ms=600_000) for prompt in PROMPTS[2:6]]
    cluster.run(cluster.ended(young))
    assert not any(cluster.ended(uid)() for uid in later)
    cluster.run(cluster.ended(old, *later))


def test_a_sequence_that_paused_for_the_ledger_goes_on_with_a_new_block() -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    away_until = cluster.now + 1.5
    cluster.ledger_fault = lambda asked: "lost" if cluster.now < away_until else ""
    cluster.run(limit_s=1)
    machine = cluster.runners["d0"].machine
    assert not any(lease.in_engine for lease in machine.table.values()), "both have paused"
    assert not machine.pool.counts().get("in_step")
    cluster.run(cluster.ended(old, young))
    for uid, prompt in zip((old, young), PROMPTS, strict=False):
        assert_exact(cluster, uid, prompt, LONG)


def test_an_aborted_sequence_leaves_its_blocks_to_who_needs_one() -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    cluster.run(lambda: held(cluster, old) + held(cluster, young) == 16)
    cluster.ledger.execute(Abort(young, "user"))
    finish(cluster, old)
    assert not preempted(cluster.runners["d0"])
    assert_exact(cluster, old, PROMPTS[0], LONG)


def test_where_no_block_is_free_nobody_gives_way_but_the_youngest() -> None:
    cluster = Cluster(num_blocks=17)
    old, middle, young = submit_in_order(cluster, 3)
    node, stops = cluster.runners["d0"], []
    node.stop = stops.append  # type: ignore[method-assign]
    cluster.run(lambda: bool(stops))
    cluster.run(limit_s=1)
    assert preempted(node) == [young], "its blocks are enough, as soon as they are free"
    assert {cluster.snapshot(uid).attempt for uid in (old, middle)} == {1}


def test_a_sequence_that_paused_without_room_for_its_next_step_waits_for_a_block() -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    cluster.run(lambda: held(cluster, old) + held(cluster, young) == 16)
    node = cluster.runners["d0"]
    mine = next(lease for lease in node.machine.table.values() if lease.uid == old)
    away = True
    cluster.ledger_fault = lambda asked: "lost" if away and isinstance(asked, (Emit, FailAttempt)) else ""
    cluster.run(lambda: mine.needed_blocks(4) > len(mine.blocks), 1)
    node.machine._stop(mine.lease_id, mine)  # as if it had run too far ahead of the ledger
    for effect in node.machine._flush():
        node.node._perform[type(effect)](effect)
    cluster.run(lambda: not mine.in_engine, 1)
    away = False
    starts: list[int] = []
    start = node.start

    def listen(job: do.Start) -> None:
        if job.key == mine.lease_id:
            starts.append(len(job.blocks) - mine.needed_blocks(4))
        start(job)

    node.start = listen  # type: ignore[method-assign]
    cluster.run(cluster.ended(old, young))
    assert starts
    assert min(starts) >= 0
    assert_exact(cluster, old, PROMPTS[0], LONG)


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.02, 0.1])
def test_an_abort_of_one_that_was_preempted_brings_every_block_back(after_s: float) -> None:
    cluster = Cluster(num_blocks=16)
    old, young = submit_in_order(cluster, 2)
    cluster.run(lambda: bool(preempted(cluster.runners["d0"])))
    cluster.run(limit_s=after_s)
    cluster.ledger.execute(Abort(young, "user"))
    finish(cluster, old)
    assert_exact(cluster, old, PROMPTS[0], LONG)
    assert cluster.snapshot(young).state == "ABORTED"
    cluster.run(cluster.at_baseline, 3)
