"""Rule 5: blocks come free only when engine and mover say that they have stopped, whatever the ledger says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Abort, FailAttempt
from app.protocol.messages import Commit
from app.protocol.tables import BlockState
from tests.unit.protocol.cluster import Cluster, Runner, reference

PROMPT = (5, 6, 7, 8, 9, 10)
LONG_S = 5.0


def slow(cluster: Cluster, runner: Runner, part: str) -> list[do.Effect | str]:
    """Let ``part`` of the runner take LONG_S each time; returns what it was called with."""
    original: Callable[[object], None] = getattr(runner, part)
    begun: list[do.Effect | str] = []

    def later(job: do.Effect | str) -> None:
        begun.append(job)
        cluster.after(LONG_S, lambda: original(job))

    setattr(runner, part, later)
    return begun


def states(runner: Runner, blocks: tuple[int, ...]) -> set[BlockState]:
    return {runner.machine.pool.owner_of(block)[1] for block in blocks}


def test_prefill_holds_its_blocks_until_the_pull_is_acknowledged() -> None:
    cluster = Cluster()
    pulls = slow(cluster, cluster.runners["d0"], "pull")
    prefill = cluster.runners["p0"].machine
    prefill.config = replace(prefill.config, link_timeout_s=2 * LONG_S)
    uid = cluster.submit(PROMPT, 10)
    cluster.run(lambda: bool(pulls), 5)
    (pull,) = pulls
    assert isinstance(pull, do.Pull)
    cluster.run(limit_s=LONG_S - 1)
    assert states(cluster.runners["p0"], pull.source) == {BlockState.HELD}
    cluster.run(cluster.ended(uid), 5)
    cluster.run(cluster.at_baseline, 5)
    record = cluster.snapshot(uid)
    assert (record.failures, record.output_ids) == (0, reference(PROMPT, 10))


def test_a_pull_that_is_never_acknowledged_does_not_hold_them_for_ever() -> None:
    cluster = Cluster()
    cluster.lose_message = lambda message: not isinstance(message, Commit) and message.kind != "grant"
    cluster.runners["d0"].pull = lambda job: None  # type: ignore[method-assign]
    uid = cluster.submit(PROMPT, 10, max_attempts=1)
    cluster.run(cluster.ended(uid), 10)
    cluster.run(limit_s=1)
    assert cluster.runners["p0"].machine.pool.free == 16
    assert cluster.snapshot(uid).error_code == "pull_timeout"


def test_blocks_that_are_being_pulled_into_are_nobody_elses_before_the_mover_stops() -> None:
    cluster = Cluster()
    runner = cluster.runners["d0"]
    pulls = slow(cluster, runner, "pull")
    uid = cluster.submit(PROMPT, 10)
    cluster.run(lambda: bool(pulls), 5)
    (pull,) = pulls
    assert isinstance(pull, do.Pull)
    cluster.ledger.execute(Abort(uid, "test"))
    cluster.run(limit_s=LONG_S - 1)
    assert states(runner, pull.target) == {BlockState.PULLING}
    cluster.run(cluster.at_baseline, 2)


@pytest.mark.parametrize(("name", "state"), [("p0", BlockState.RUNNING), ("d0", BlockState.IN_STEP)])
def test_blocks_that_a_step_may_write_are_nobody_elses_before_the_engine_stops(name: str, state: BlockState) -> None:
    cluster = Cluster()
    runner = cluster.runners[name]
    runner.step = lambda: None  # type: ignore[method-assign]
    slow(cluster, runner, "stop")
    uid = cluster.submit(PROMPT, 50)
    cluster.run(lambda: bool(runner.sequences), 5)
    (running,) = runner.sequences.values()
    cluster.ledger.execute(Abort(uid, "test"))
    cluster.run(limit_s=LONG_S - 1)
    assert states(runner, running.job.blocks) == {state}
    cluster.run(cluster.at_baseline, 5)


def test_blocks_that_are_being_digested_are_kept_until_the_mover_stops() -> None:
    cluster = Cluster()
    runner = cluster.runners["p0"]
    seals = slow(cluster, runner, "seal")
    uid = cluster.submit(PROMPT, 10)
    cluster.run(lambda: bool(seals), 5)
    (seal,) = seals
    assert isinstance(seal, do.Seal)
    cluster.ledger.execute(Abort(uid, "test"))
    cluster.run(limit_s=LONG_S - 1)
    assert states(runner, seal.blocks) == {BlockState.HELD}
    cluster.run(cluster.at_baseline, 2)


def test_blocks_of_a_failure_that_the_ledger_does_not_know_are_kept() -> None:
    cluster = Cluster()
    runner = cluster.runners["d0"]
    cluster.ledger_fault = lambda command: "lost" if isinstance(command, FailAttempt) else ""
    uid = cluster.submit(PROMPT, 50)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 3, 5)
    (lease,) = runner.machine.table.values()
    runner.feed(on.HandBackAsked())
    cluster.run(limit_s=LONG_S)
    assert not runner.sequences
    assert (cluster.snapshot(uid).state, states(runner, lease.blocks)) == ("DECODING", {BlockState.READY})
    cluster.ledger_fault = lambda command: ""
    cluster.run(cluster.ended(uid), 10)
    cluster.run(cluster.at_baseline, 5)
    assert cluster.snapshot(uid).output_ids == reference(PROMPT, 50)
