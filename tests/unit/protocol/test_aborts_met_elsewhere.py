"""Aborts that brought other systems down: whenever they come, every block comes back and nobody else notices."""

from __future__ import annotations

import pytest

from app.protocol import events as on
from app.protocol.commands import Abort
from app.protocol.decode.lease import Phase as LeasePhase
from app.protocol.messages import Grant
from app.protocol.prefill import Phase as AttemptPhase
from tests.unit.protocol.cluster import Cluster, Runner
from tests.unit.protocol.rest import assert_exact, come_to_rest, expect_exact, leases_in, take_longer

PROMPT = (5, 6, 7, 8, 9, 10)
OTHER = (3, 1, 4, 1, 5)
COMPLETIONS = on.Answered | on.AskFailed | on.CallEnded | on.Stepped | on.Stopped | on.Sealed | on.Pulled


def abort_as_soon_as_it_is(cluster: Cluster, uid: str, phase: AttemptPhase | LeasePhase) -> None:
    """Abort ``uid`` right after the happening that brought it into ``phase`` on a node."""
    check = cluster.check
    aborted: list[float] = []

    def watch() -> None:
        check()
        held = [held for runner in cluster.runners.values() for held in runner.machine.table.values()]
        if not aborted and any(one.uid == uid and one.phase is phase for one in held):
            aborted.append(cluster.now)
            cluster.ledger.execute(Abort(uid, "test"))

    cluster.check = watch  # type: ignore[method-assign]
    cluster.run(lambda: bool(aborted), 5)


@pytest.mark.parametrize("phase", [*AttemptPhase, *LeasePhase], ids=lambda phase: f"{type(phase).__module__}.{phase}")
def test_an_abort_in_any_phase_frees_every_block_and_stops_the_computing(phase: AttemptPhase | LeasePhase) -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    neighbour = cluster.submit(OTHER, 10)  # in the engine while the other one stands in line
    uid = cluster.submit(PROMPT, 10)
    if phase is AttemptPhase.COMPUTED:  # a grant that is late
        cluster.lose_message = lambda message: isinstance(message, Grant) and message.uid == uid
    abort_as_soon_as_it_is(cluster, uid, phase)
    told = cluster.snapshot(uid).output_ids
    cluster.run(cluster.ended(neighbour), 5)
    come_to_rest(cluster)
    record = cluster.snapshot(uid)
    assert (record.state, record.output_ids) == ("ABORTED", told)
    assert_exact(cluster, neighbour, OTHER, 10)
    expect_exact(cluster, (77, 78))


def test_an_abort_while_decode_waits_for_the_kv_frees_both_sides() -> None:
    cluster = Cluster()
    take_longer(cluster.runners["p0"], "step", 0.5)  # the abort is heard when it is over
    uid = cluster.submit(PROMPT, 50)
    cluster.run(lambda: bool(leases_in(cluster, LeasePhase.GRANTED)), 0.4)
    assert cluster.runners["d0"].machine.pool.free < 16
    cluster.ledger.execute(Abort(uid, "test"))
    come_to_rest(cluster)


def twice(runner: Runner) -> None:
    """From now on everything that a part completes is told to this machine twice."""
    feed = runner.feed

    def again(event: on.Event) -> None:
        feed(event)
        if isinstance(event, COMPLETIONS):
            feed(event)

    runner.feed = again  # type: ignore[method-assign]


@pytest.mark.parametrize("phase", [*AttemptPhase, *LeasePhase], ids=lambda phase: f"{type(phase).__module__}.{phase}")
def test_completions_that_come_twice_for_what_was_aborted_are_ignored(phase: AttemptPhase | LeasePhase) -> None:
    cluster = Cluster()
    cluster.run(limit_s=1)
    blocker = cluster.submit(OTHER, 1)
    uid = cluster.submit(PROMPT, 2)  # decode's first step is its last
    if phase is AttemptPhase.COMPUTED:  # a grant that is late
        cluster.lose_message = lambda message: isinstance(message, Grant) and message.uid == uid
    abort_as_soon_as_it_is(cluster, uid, phase)
    cluster.run(cluster.ended(blocker), 1)
    cluster.lose_message = lambda message: False
    for runner in cluster.runners.values():
        twice(runner)
    come_to_rest(cluster)
    expect_exact(cluster, (77, 78), 1)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_completions_of_what_nobody_knows_are_ignored(name: str) -> None:
    cluster = Cluster()
    uid = cluster.submit(PROMPT, 10)
    cluster.run(lambda: len(cluster.snapshot(uid).output_ids) >= 3, 5)
    runner = cluster.runners[name]
    strangers: list[on.Event] = [
        on.Stepped((on.Sample("nobody", 0, 7), on.Sample("nobody", 0, 7, "stop"))),
        on.Stopped("nobody"),
        on.Sealed("nobody", None) if name == "p0" else on.Pulled("nobody"),
        on.AskFailed(10**6, "nobody asked"),
        on.CallEnded(10**6, None),
    ]
    for event in strangers:
        assert runner.machine.receive(event, cluster.now) == []
    cluster.run(cluster.ended(uid), 5)
    assert_exact(cluster, uid, PROMPT, 10)
