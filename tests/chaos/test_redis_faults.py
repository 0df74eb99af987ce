"""Faults of the ledger's and the broker's server under running requests: real processes, the default model.

Whatever happens, an open answer goes on exactly or ends with an explicit error, new requests are served or refused,
``/ready`` says so, and afterwards everything is as before, with nobody touching anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.chaos.asked import Asked
from tests.chaos.server_faults import WORKERS, Cluster, ReadyWatch
from tests.waiting import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.matrix, pytest.mark.timeout(240)]

OPEN = 3
LONG, SHORT = 48, 4
"""Tokens of an answer that a fault meets in its middle, and of one that is asked for meanwhile."""
ASK_EVERY_S = 1.5
STARTED_S = 60.0
ENDED_S = 60.0
"""From the end of a fault until everything that it met has ended: a busy machine computes for long."""
READY_S = 15.0
READY_TAKES_S = 6.0
SILENCE_S = 12.0
"""A ping comes after 5 s of quiet, and a ledger call that hangs may hold one up for 2 s, one that connects for 4 s."""
CALM_S = 15.0


@pytest.fixture(scope="module")
def cluster(new_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("faults")
    made = Cluster(new_home(folder), folder)
    try:
        made.baton.wait_until_ready()
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Fault:
    strike: Callable[[Cluster], AbstractContextManager[None]]
    lasts_s: float
    unready: str = ""
    """What a reason of ``/ready`` has in it while it lasts; empty: it need not be unready."""


@dataclass
class Story:
    """What was seen of one fault."""

    open: list[Asked]
    new: list[Asked]
    later: list[Asked]
    watch: ReadyWatch


def live_through(cluster: Cluster, fault: Fault) -> Story:
    """Have answers open, strike, go on asking, and wait until everything is well again."""
    before = cluster.pids()
    with ReadyWatch(cluster).watching() as watch:
        story = Story([cluster.ask(case, LONG) for case in range(1, 1 + OPEN)], [], [], watch)
        wait_for(lambda: all(len(each.token_ids) > 4 for each in story.open), STARTED_S, lambda: story.open)
        assert not any(each.ended.is_set() for each in story.open), story.open
        struck_at = time.monotonic()
        with fault.strike(cluster):
            last_through(cluster, fault, story, struck_at)
        over_at = time.monotonic()
        wait_for(lambda: watch.is_ready(over_at), READY_S, lambda: watch.since(over_at)[-1:])
        ready_s = time.monotonic() - over_at
        story.new.append(cluster.ask(4, SHORT))
        everything = story.open + story.new
        wait_for(lambda: all(each.ended.is_set() for each in everything), ENDED_S, lambda: everything)
        story.later = [cluster.ask(case, SHORT, streams=bool(case % 2)) for case in range(2, 7)]
        wait_for(lambda: all(each.ended.is_set() for each in story.later), ENDED_S, lambda: story.later)
        wait_for(lambda: not cluster.left(), CALM_S, cluster.left)
        print(f"ready after {ready_s:.1f} s", *everything, *story.later, sep="\n")
        print({reason for look in watch.since(struck_at) for reason in look.reasons})
    assert cluster.pids() == before
    return story


def last_through(cluster: Cluster, fault: Fault, story: Story, struck_at: float) -> None:
    """Go on asking while the fault lasts; long enough that ``/ready`` has to know of it."""
    while time.monotonic() < struck_at + fault.lasts_s:
        story.new.append(cluster.ask(4, SHORT, streams=bool(len(story.new) % 2)))
        time.sleep(ASK_EVERY_S)
    if fault.unready:
        wait_for(lambda: story.watch.names(fault.unready, struck_at), READY_TAKES_S, lambda: story.watch.looks[-3:])
        unready_at = next(look.at for look in story.watch.since(struck_at) if not look.ready)
        assert not story.watch.is_ready(unready_at)


def check(story: Story) -> None:
    """What holds for every fault."""
    asked = story.open + story.new + story.later
    assert [each for each in asked if each.problem] == []
    assert [each for each in asked if each.streams and each.longest_silence_s > SILENCE_S] == []
    assert [each for each in story.later if not each.exact] == []
    assert [look for look in story.watch.looks if look.took_s > READY_TAKES_S] == []


SERVER_FAULTS = {
    "killed, and back with its data": Fault(Cluster.killed, 4, "the ledger"),
    "killed, and back without its data": Fault(Cluster.killed_and_emptied, 4, "the ledger"),
    "flushed": Fault(Cluster.flushed, 0),
    "frozen for 10 s": Fault(Cluster.frozen, 10, "the ledger"),
    "read-only": Fault(Cluster.read_only, 5, "the ledger"),
    "out of memory": Fault(Cluster.out_of_memory, 5, "the ledger"),
    "all connections reset": Fault(Cluster.reset, 0),
}


@pytest.mark.parametrize("fault", SERVER_FAULTS.values(), ids=SERVER_FAULTS.keys())
def test_the_server_fails_and_everything_ends_exactly_or_says_why_and_recovers(cluster: Cluster, fault: Fault) -> None:
    check(live_through(cluster, fault))
    wait_for(lambda: cluster.consuming() == WORKERS, CALM_S, cluster.consuming)


BROKER_FAULTS = {
    "frozen for 10 s": Fault(Cluster.broker_frozen, 10, "the broker"),
    "half-open": Fault(Cluster.broker_half_open, 0),
    "reset": Fault(Cluster.broker_reset, 0),
    "gone, and back without its messages": Fault(Cluster.broker_restarted_empty, 5, "the broker"),
}


@pytest.mark.parametrize("fault", BROKER_FAULTS.values(), ids=BROKER_FAULTS.keys())
def test_the_broker_alone_fails_and_no_request_does(cluster: Cluster, fault: Fault) -> None:
    story = live_through(cluster, fault)
    check(story)
    assert [each for each in story.open + story.new if not each.exact] == []
    wait_for(lambda: cluster.consuming() == WORKERS, CALM_S, cluster.consuming)
    scans = cluster.scans()
    wait_for(lambda: cluster.scans() > scans >= 0, CALM_S, cluster.scans)


def test_an_idle_worker_that_is_frozen_takes_a_bell_and_is_killed_costs_time_only(cluster: Cluster) -> None:
    """A frozen worker's last question to the broker stands for a second: the bell is handed to it, and dies with it."""
    worker = psutil.Process(cluster.baton.nodes()["prefill1"]["pid"])
    worker.suspend()
    asked = cluster.ask(1, SHORT)
    wait_for(lambda: cluster.baton.get("/cluster")[1]["queued"] == 1, CALM_S, lambda: asked)
    wait_for(lambda: cluster.redis.llen("baton:broker:prefill") == 0, CALM_S, lambda: "the bell still waits")
    worker.kill()
    wait_for(asked.ended.is_set, STARTED_S, lambda: asked)
    assert asked.exact, asked
    wait_for(lambda: not cluster.left(), CALM_S, cluster.left)
