"""A prompt is computed from the first token on whose KV is not known; and nothing is known but what is whole and right.

A block holds 4 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Abort, Emit
from app.protocol.prefix_cache import block_keys
from app.protocol.tables import BlockState
from tests.unit.protocol.cluster import Cluster, Runner, reference
from tests.unit.protocol.rest import come_to_rest
from tests.unit.protocol.test_engine_outcomes import says
from tests.unit.protocol.test_late_writers import slow, states

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
"""Two full blocks and a half."""


def starts(runner: Runner) -> list[do.Start]:
    """What its engine is given from now on."""
    given: list[do.Start] = []
    start = runner.start

    def note(job: do.Start) -> None:
        given.append(job)
        start(job)

    runner.start = note  # type: ignore[method-assign]
    return given


def answered(cluster: Cluster, uid: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 10) -> int:
    """Run it to its end, which must be the undisturbed one; returns how much of the prompt was not computed."""
    cluster.run(cluster.ended(uid), 20)
    come_to_rest(cluster)
    record = cluster.snapshot(uid)
    assert (record.state, record.output_ids) == ("FINISHED", reference(prompt, max_tokens))
    return record.cached_tokens


def cached_blocks(cluster: Cluster) -> int:
    return int(cluster.runners["p0"].machine.pool.counts().get("cached", 0))


def test_the_same_prompt_again_is_computed_from_its_last_block_on() -> None:
    cluster = Cluster()
    given = starts(cluster.runners["p0"])
    assert answered(cluster, cluster.submit(PROMPT)) == 0
    assert cached_blocks(cluster) == 2
    assert answered(cluster, cluster.submit(PROMPT)) == 8
    assert [job.num_computed for job in given] == [0, 8]
    assert given[1].blocks[:2] == given[0].blocks[:2]
    counts = {
        "prompts": 2,
        "hits": 1,
        "computed_tokens": 12,
        "cached_tokens": 8,
        "evicted_blocks": 0,
        "corrupted_blocks": 0,
    }
    assert cluster.runners["p0"].machine.cache_counts() == counts


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_of_a_prompt_is_always_computed(length: int, cached: int) -> None:
    cluster = Cluster()
    prompt = PROMPT[:length]
    answered(cluster, cluster.submit(prompt), prompt)
    assert answered(cluster, cluster.submit(prompt), prompt) == cached


@pytest.mark.parametrize(("common", "cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8)])
def test_another_prompt_starts_after_the_blocks_that_it_has_in_common(common: int, cached: int) -> None:
    cluster = Cluster()
    answered(cluster, cluster.submit(PROMPT))
    other = (*PROMPT[:common], *(token + 100 for token in PROMPT[common:]))
    assert answered(cluster, cluster.submit(other), other) == cached


def test_another_salt_finds_nothing() -> None:
    cluster = Cluster()
    assert answered(cluster, cluster.submit(PROMPT, salt="a")) == 0
    assert answered(cluster, cluster.submit(PROMPT, salt="b")) == 0
    assert answered(cluster, cluster.submit(PROMPT)) == 0
    assert answered(cluster, cluster.submit(PROMPT, salt="a")) == 8


@pytest.mark.parametrize(("length", "known"), [(10, 2), (8, 1), (4, 0)])
def test_what_is_computed_while_a_prompt_stands_in_line_it_need_not_compute(length: int, known: int) -> None:
    cluster = Cluster(num_blocks=6)
    given, prompt = starts(cluster.runners["p0"]), PROMPT[:length]
    uids = [cluster.submit(prompt, 2) for _ in range(2)]
    pool = cluster.runners["p0"].machine.pool
    cluster.run(lambda: len(given) == 2, 5)
    assert [job.num_computed for job in given] == [0, 4 * known]
    assert given[1].blocks[:known] == given[0].blocks[:known]
    assert pool.free == 6 - 2 * len(given[0].blocks) + known, "its own blocks for them are free again"
    for uid in uids:
        answered(cluster, uid, prompt, 2)


@pytest.mark.parametrize(("common", "waits"), [(8, True), (4, False), (0, False)])
def test_a_prompt_half_of_which_another_is_about_to_compute_waits_for_that_step(common: int, waits: bool) -> None:
    """Both would fit into the one step."""
    cluster = Cluster(num_blocks=32)
    runner = cluster.runners["p0"]
    given = starts(runner)
    runner.step = lambda: None  # type: ignore[method-assign]  # a step that does not end yet
    first = (*range(300, 305),)
    cluster.submit(first, 2)
    cluster.run(lambda: len(given) == 1, 5)
    other = (*PROMPT[:common], *(token + 100 for token in PROMPT[common:]))
    uids = [cluster.submit(prompt, 2) for prompt in (PROMPT, other)]
    cluster.run(lambda: len(runner.machine.table) == 3, 5)
    del runner.step
    runner.step()
    cluster.run(lambda: len(given) == 3, 5)
    assert [job.num_computed for job in given] == [0, 0, common if waits else 0]
    for uid, prompt in zip(uids, (PROMPT, other), strict=True):
        assert answered(cluster, uid, prompt, 2) == (common if waits and prompt is other else 0)


def test_prompts_that_begin_alike_are_computed_one_after_the_other() -> None:
    cluster = Cluster(num_blocks=32)
    given = starts(cluster.runners["p0"])
    first = cluster.submit((99,) * 3, 2)
    like = [cluster.submit(PROMPT, 2) for _ in range(3)]
    others = [cluster.submit((*range(50 * i, 50 * i + 9),), 2) for i in (1, 2)]
    cluster.run(lambda: len(given) == 6, 5)
    assert [job.work.uid for job in given] == [first, *like, *others]
    assert [job.num_computed for job in given] == [0, 0, 8, 8, 0, 0]
    for uid in like:
        answered(cluster, uid, PROMPT, 2)


def test_a_shared_block_is_pinned_until_the_last_pull_is_acknowledged() -> None:
    cluster = Cluster()
    first = cluster.submit(PROMPT)
    cluster.run(cluster.ended(first), 5)
    pulls = slow(cluster, cluster.runners["d0"], "pull")
    prefill = cluster.runners["p0"].machine
    prefill.config = replace(prefill.config, link_timeout_s=20.0)
    uids = [cluster.submit(PROMPT) for _ in range(2)]
    cluster.run(lambda: len(pulls) == 2, 5)
    one, other = (pull.source[:2] for pull in pulls if isinstance(pull, do.Pull))
    assert one == other and states(cluster.runners["p0"], one) == {BlockState.HELD}
    cluster.run(cluster.ended(uids[0]), 20)
    for uid in uids:
        assert answered(cluster, uid) == 8
    assert states(cluster.runners["p0"], one) == {BlockState.CACHED}


def test_an_answer_that_ends_with_its_first_token_leaves_its_prompt_known() -> None:
    cluster = Cluster()
    answered(cluster, cluster.submit(PROMPT, 1), max_tokens=1)
    assert answered(cluster, cluster.submit(PROMPT, 1), max_tokens=1) == 8


def test_an_aborted_prompt_that_was_not_computed_to_its_end_leaves_nothing() -> None:
    cluster = Cluster()
    runner = cluster.runners["p0"]
    runner.step = lambda: None  # type: ignore[method-assign]  # a step that does not end
    uid = cluster.submit(PROMPT)
    cluster.run(lambda: bool(runner.sequences), 5)
    cluster.ledger.execute(Abort(uid, "test"))
    ((key, attempt),) = runner.machine.table.items()
    cluster.run(lambda: attempt.stop_sent, 5)
    runner.feed(on.Stopped(key))
    assert runner.machine.pool.counts() == {"total": 16, "free": 16}


def test_a_prompt_whose_step_ends_after_it_was_aborted_is_known() -> None:
    cluster = Cluster()
    runner = cluster.runners["p0"]
    step = runner.step
    runner.step = lambda: cluster.after(2.0, step)  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT)
    cluster.run(lambda: bool(runner.sequences), 5)
    cluster.ledger.execute(Abort(uid, "test"))
    ((_, attempt),) = runner.machine.table.items()
    cluster.run(lambda: attempt.stop_sent, 3)
    cluster.run(lambda: runner.machine.idle, 3)
    assert cached_blocks(cluster) == 2
    runner.step = step  # type: ignore[method-assign]
    assert answered(cluster, cluster.submit(PROMPT)) == 8


def test_an_engine_error_leaves_nothing_and_the_next_attempt_starts_from_nothing() -> None:
    cluster = Cluster()
    answered(cluster, cluster.submit(PROMPT[:6]), PROMPT[:6])
    given = starts(cluster.runners["p0"])
    says(cluster.runners["p0"], on.Sample("", 0, on.NO_TOKEN, error="not a number"))
    assert answered(cluster, cluster.submit(PROMPT)) == 0
    assert [job.num_computed for job in given] == [0], "the known block may have been what it cannot compute with"


def test_an_answer_that_had_ended_already_was_not_computed() -> None:
    cluster = Cluster()
    says(cluster.runners["p0"], on.Sample("", 0, on.NO_TOKEN, "stop"))
    uid = cluster.submit(PROMPT)
    cluster.run(cluster.ended(uid), 5)
    come_to_rest(cluster)
    assert cached_blocks(cluster) == 0


def kept(runner: Runner, part: str) -> list[Any]:
    """What ``part`` of the runner is asked to do from now on; nothing of it is done before ``go_on``."""
    jobs: list[Any] = []
    setattr(runner, part, jobs.append)
    return jobs


def go_on(runner: Runner, part: str, jobs: list[Any]) -> None:
    delattr(runner, part)
    for job in jobs:
        getattr(runner, part)(job)


@pytest.mark.parametrize("block", [0, 1])
def test_a_known_block_whose_bytes_have_changed_is_found_out_and_computed_anew(block: int) -> None:
    cluster = Cluster()
    runner = cluster.runners["p0"]
    answered(cluster, cluster.submit(PROMPT))
    given = starts(runner)
    bad = runner.machine.pool.pin(block_keys(PROMPT, 4, ""), "test")
    runner.machine.pool.give_back(bad, "test")
    runner.memory[bad[block]][0] ^= 1
    uid = cluster.submit(PROMPT)
    assert answered(cluster, uid) == 4 * block
    assert cluster.snapshot(uid).failures == 0
    assert [job.num_computed for job in given] == [4 * block]
    assert not set(bad[block:]) & set(given[0].blocks[:block]), "nor is what follows it"
    counts = runner.machine.cache_counts()
    assert (counts["corrupted_blocks"], counts["cached_tokens"], counts["computed_tokens"]) == (
        1,
        4 * block,
        20 - 4 * block,
    )
    assert sum(line.event == "cached KV corrupted" for line in runner.log) == 1
    assert answered(cluster, cluster.submit(PROMPT)) == 8, "what was computed anew is known"


def test_a_block_that_changes_between_check_and_pull_is_found_out_by_the_pull() -> None:
    cluster = Cluster()
    runner = cluster.runners["p0"]
    answered(cluster, cluster.submit(PROMPT))
    given = starts(runner)

    seal, once = runner.seal, iter([True])

    def spoiled(job: do.Seal | do.Check) -> None:
        seal(job)
        if isinstance(job, do.Seal) and next(once, False):
            runner.memory[job.blocks[0]][0] ^= 1

    runner.seal = spoiled  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT)
    assert answered(cluster, uid) == 8, "of the attempt that drew the first token"
    assert cluster.snapshot(uid).failures == 1
    assert [job.num_computed for job in given] == [8, 0]


def test_where_a_dropped_block_leaves_no_room_the_attempt_comes_again_through_nobodys_fault() -> None:
    cluster = Cluster(num_blocks=6)
    prefill, decode = cluster.runners["p0"], cluster.runners["d0"]
    machine, short = prefill.machine, tuple(range(200, 205))
    answered(cluster, cluster.submit(PROMPT, 2), max_tokens=2)
    machine.config = replace(machine.config, link_timeout_s=20.0)
    pulls, checks = kept(decode, "pull"), kept(prefill, "seal")
    first = cluster.submit(PROMPT, 2)
    cluster.run(lambda: bool(checks), 5)
    go_on(prefill, "seal", checks)
    cluster.run(lambda: bool(pulls), 5)
    prefill.memory[pulls[0].source[0]][0] ^= 1
    checks = kept(prefill, "seal")
    second = cluster.submit(PROMPT, 2)
    cluster.run(lambda: bool(checks), 5)
    third = cluster.submit(short, 2)
    cluster.run(lambda: machine.pool.free == 0, 5)
    go_on(prefill, "seal", checks)
    cluster.run(lambda: cluster.snapshot(second).attempt == 2, 5)
    assert machine.cache_counts()["corrupted_blocks"] == 1
    go_on(decode, "pull", pulls)
    answered(cluster, third, short, 2)
    for uid, failures in ((first, 1), (second, 0)):
        answered(cluster, uid, max_tokens=2)
        assert cluster.snapshot(uid).failures == failures, "the pull of the first finds the same block changed"


def test_what_is_cached_was_digested_before_its_first_holder_let_go_of_it() -> None:
    """Also where nobody was to pull it."""
    cluster = Cluster()
    runner = cluster.runners["p0"]
    seals = slow(cluster, runner, "seal")
    uid = cluster.submit(PROMPT, 1)
    cluster.run(cluster.ended(uid), 3)
    assert cached_blocks(cluster) == 0
    assert len(seals) == 1
    cluster.run(lambda: bool(runner.machine.idle), 6)
    pool = runner.machine.pool
    cached = [block for block in range(pool.num_blocks) if pool.owner_of(block)[1] is BlockState.CACHED]
    assert len(cached) == 2 and all(pool.digests(cached))


def test_cold_warm_and_partly_hit_at_every_offset_the_answer_is_the_same() -> None:
    cluster = Cluster(num_blocks=32)
    for offset in range(len(PROMPT) + 1):
        salt = f"salt {offset}"
        begun = (*PROMPT[:offset], *(token + 100 for token in PROMPT[offset:]), 3)
        assert answered(cluster, cluster.submit(begun, salt=salt), begun) == 0
        partly = min(offset // 4 * 4, 8)
        assert answered(cluster, cluster.submit(PROMPT, salt=salt)) == partly
        assert answered(cluster, cluster.submit(PROMPT, salt=salt)) == 8


def test_a_resumed_request_starts_from_its_prompt_and_what_was_cached_stays_what_it_was() -> None:
    cluster = Cluster(decode=2)
    given = starts(cluster.runners["p0"])
    uid = cluster.submit(PROMPT, 12)
    store = cluster.ledger.store
    cluster.run(lambda: len(store.records[uid].tokens) >= 4, 5)
    name = store.records[uid].decode_node
    cluster.runners[name].dead = True
    cluster.run(cluster.ended(uid), 20)
    record = cluster.snapshot(uid)
    assert (record.output_ids, record.attempt, record.cached_tokens) == (reference(PROMPT, 12), 2, 0)
    assert [job.num_computed for job in given] == [0, 8]
    assert len(given[1].work.output_ids) >= 4


def test_activation_tells_what_was_cached_where_the_first_token_was_lost() -> None:
    cluster = Cluster()
    answered(cluster, cluster.submit(PROMPT))
    lose = iter([True])
    cluster.ledger_fault = lambda command: "lost" if isinstance(command, Emit) and next(lose, False) else ""
    assert answered(cluster, cluster.submit(PROMPT)) == 8
    assert next(lose, None) is None


def test_decode_tells_what_was_cached_where_the_ledger_forgot_all_tokens() -> None:
    cluster = Cluster()
    answered(cluster, cluster.submit(PROMPT))
    uid = cluster.submit(PROMPT, 20)
    store = cluster.ledger.store
    cluster.run(lambda: store.records[uid].state == "DECODING", 5)
    record = store.records[uid]
    del record.tokens[:]
    record.cached_tokens = 0
    assert answered(cluster, uid, max_tokens=20) == 8


def test_switched_off_nothing_is_kept() -> None:
    cluster = Cluster()
    machine = cluster.runners["p0"].machine
    machine.config = replace(machine.config, prefix_cache=False)
    for _ in range(2):
        assert answered(cluster, cluster.submit(PROMPT)) == 0
    assert machine.pool.counts() == {"total": 16, "free": 16}


def test_where_there_is_little_room_the_longest_unused_goes_and_answers_stay_exact() -> None:
    cluster = Cluster(num_blocks=6)
    prompts = [tuple(token + 100 * number for token in PROMPT) for number in range(3)]
    found = [answered(cluster, cluster.submit(prompt), prompt) for _ in range(2) for prompt in prompts]
    # The third takes the second block of the first; from then on each finds its own first block, and takes the second
    # one of whoever was used longest ago.
    assert found == [0, 0, 0, 4, 4, 4]
    assert answered(cluster, cluster.submit(prompts[-1]), prompts[-1]) == 8
    assert cluster.runners["p0"].machine.cache_counts()["evicted_blocks"] > 0


def test_a_node_full_of_cached_blocks_takes_a_prompt_that_needs_them_all() -> None:
    cluster = Cluster(num_blocks=4)
    answered(cluster, cluster.submit(PROMPT, 2), max_tokens=2)
    large = tuple(range(200, 214))
    assert answered(cluster, cluster.submit(large, 2), large, 2) == 0
