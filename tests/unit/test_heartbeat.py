"""The heartbeat thread on the memory twin: registration, beats, scans, and that nothing holds it up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.bells import BellLane
from app.errors import LedgerUnavailable
from app.heartbeat import HeartbeatThread
from app.ledger.memory import MemoryLedger
from app.protocol.commands import Admit, Bell, Cluster, Deregister, Drain, Heartbeat, Limits, Register, Scan, Watcher
from app.schemas import Gauges, NodeInfo, SamplingParams
from app.settings import load_settings
from app.versions import SPOKEN
from tests.waiting import wait_for

SETTINGS = load_settings(heartbeat_s=0.01, node_ttl_s=5.0)
NODE = NodeInfo(incarnation="n", role="web", name="web-n", pid=1, host="h", model="one")


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Gate(MemoryLedger):
    """A ledger that can be out of reach, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(wall_ms)
        self.closed = False
        self.asked: list[str] = []

    def execute(self, command: Any) -> Any:
        if self.closed:
            raise LedgerUnavailable("the gate is closed")
        self.asked.append(command.name)
        return super().execute(command)


@pytest.fixture
def ledger() -> Gate:
    return Gate()


class Calls:
    """What the thread told its process."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, *what: Any) -> Callable[..., None]:
        return lambda *arguments: self.made.append((*what, *arguments) if arguments else what[0])

    def count(self, what: Any) -> int:
        return self.made.count(what)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def beat(ledger: Gate, calls: Calls) -> Iterator[Callable[..., HeartbeatThread]]:
    made: list[HeartbeatThread] = []

    def make(node: NodeInfo = NODE, patience_s: float = 0.0, **more: Any) -> HeartbeatThread:
        told: dict[str, Any] = {
            "ring": calls("ring"),
            "on_crash": calls("crash"),
            "on_registered": calls("registered"),
            "on_refused": calls("refused"),
            "on_ledger_restarted": calls("restarted"),
            "on_draining": calls("draining"),
            "after_beat": calls("after"),
        }
        made.append(HeartbeatThread(SETTINGS, ledger, node, Gauges, **(told | more)))
        made[-1]._refused_for_s = patience_s
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert not each.alive


def queue_a_request(ledger: MemoryLedger, uid: str = "u") -> None:
    ledger.execute(Register(NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h"), 10_000_000))
    limits = Limits(1, 10, 60_000, 60_000, 60_000)
    ledger.execute(Admit(uid, uid, (1, 2), SamplingParams(seed=1, max_tokens=2), Watcher("w", "x"), limits))
    ledger.store.rings[uid] = 0  # its bell is due


def test_it_registers_when_the_ledger_comes_and_says_so(beat: Any, ledger: Gate, calls: Calls) -> None:
    ledger.closed = True
    heart = beat()
    assert not heart.wait_registered(0.05)
    assert calls.made == []
    ledger.closed = False
    assert heart.wait_registered(5)
    wait_for(lambda: calls.count("after") > 1)
    assert calls.count("registered") == 1
    (shown,) = ledger.execute(Cluster()).nodes
    assert (shown.node, shown.state) == (NODE, "alive")


def test_an_outage_is_logged_once_and_so_is_its_end(beat: Any, ledger: Gate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    heart = beat()
    assert heart.wait_registered(5)
    ledger.closed = True
    wait_for(lambda: "does not answer" in caplog.text)
    since = heart.answered_at
    threading.Event().wait(0.05)
    assert heart.answered_at == since
    assert heart.registered  # as far as anybody knows
    ledger.closed = False
    wait_for(lambda: heart.answered_at > since)
    wait_for(lambda: "answers again" in caplog.text)
    assert caplog.text.count("does not answer") == 1


def test_a_node_that_the_ledger_forgot_registers_again_by_itself(beat: Any, ledger: Gate, calls: Calls) -> None:
    assert beat().wait_registered(5)
    ledger.execute(Deregister("n"))
    wait_for(lambda: calls.count("registered") == 2)


def test_a_node_that_holds_something_registers_again_only_when_it_has_let_go(
    beat: Any, ledger: Gate, calls: Calls
) -> None:
    heart = beat(on_lost=calls("lost"))
    assert heart.wait_registered(5)
    ledger.execute(Deregister("n"))
    wait_for(lambda: calls.count("lost") == 1)
    asked = len(ledger.asked)
    threading.Event().wait(0.05)
    assert ledger.asked[asked:] == []
    assert not heart.registered
    heart.register()
    wait_for(lambda: calls.count("registered") == 2)
    assert calls.count("lost") == 1


def test_a_refusal_is_kept_for_people_and_ends_when_its_reason_does(
    beat: Any, ledger: Gate, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    other = NodeInfo(incarnation="p", role="prefill", name="p1", pid=1, host="h", model="two")
    ledger.execute(Register(other, 60_000))
    heart = beat()
    wait_for(lambda: len(calls.made) > 3)
    assert "two (p1)" in heart.refusal
    assert ("refused", heart.refusal) in calls.made
    assert caplog.text.count("refused node=") == 1
    assert not heart.registered
    ledger.execute(Deregister("p"))
    assert heart.wait_registered(5)
    assert heart.refusal == ""


def test_a_refusal_that_may_pass_ends_nothing(beat: Any, ledger: Gate, calls: Calls) -> None:
    ledger.execute(Register(NodeInfo(incarnation="p", role="prefill", name="p1", pid=1, host="h", model="two"), 60_000))
    heart = beat(patience_s=3600.0)
    wait_for(lambda: len(calls.made) > 3)
    assert heart.refusal != ""
    assert set(calls.made) == {"after"}


def test_a_ledger_that_went_on_to_another_version_is_a_refusal(beat: Any, ledger: Gate, calls: Calls) -> None:
    heart = beat()
    assert heart.wait_registered(5)
    assert heart.version == SPOKEN.newest
    ledger.store.version = SPOKEN.newest + 1
    wait_for(lambda: heart.refusal != "")
    assert f"version {SPOKEN.newest + 1}" in heart.refusal
    wait_for(lambda: ("refused", heart.refusal) in calls.made)


def test_a_restarted_ledger_is_noticed_once(beat: Any, ledger: Gate, calls: Calls) -> None:
    assert beat().wait_registered(5)
    assert calls.count("restarted") == 0
    ledger.restore(ledger.save())
    wait_for(lambda: calls.count("restarted") == 1)
    after = calls.count("after")
    wait_for(lambda: calls.count("after") > after + 3)
    assert calls.count("restarted") == 1


def test_a_drain_is_told_once(beat: Any, ledger: Gate, calls: Calls) -> None:
    assert beat().wait_registered(5)
    assert calls.count("draining") == 0
    ledger.execute(Drain("n"))
    wait_for(lambda: calls.count("draining") == 1)
    after = calls.count("after")
    wait_for(lambda: calls.count("after") > after + 3)
    assert calls.count("draining") == 1


def test_a_node_alone_scans_and_hands_the_bells_over(beat: Any, ledger: Gate, calls: Calls) -> None:
    queue_a_request(ledger)
    beat()
    wait_for(lambda: ("ring", Bell("prefill", "u", 1)) in calls.made)


def test_it_does_not_scan_when_somebody_just_has(beat: Any, ledger: Gate, calls: Calls) -> None:
    ledger.execute(Scan(0))
    queue_a_request(ledger)
    beat()
    wait_for(lambda: "scan" in ledger.asked[2:])
    wait_for(lambda: calls.count("after") > 3)
    assert all(call[0] != "ring" for call in calls.made)


class StuckBroker:
    """Rings for ever."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.rung: list[Bell] = []

    def ring(self, bell: Bell) -> None:
        self.entered.set()
        assert self.leave.wait(10)
        self.rung.append(bell)

    def close(self) -> None:
        self.leave.set()


def test_a_broker_that_hangs_does_not_hold_up_heartbeats(beat: Any, ledger: Gate, calls: Calls) -> None:
    broker = StuckBroker()
    lane = BellLane(broker, calls("crash"))
    lane.start()
    queue_a_request(ledger)
    heart = beat(ring=lane.ring)
    assert broker.entered.wait(5)
    since = heart.answered_at
    beats = ledger.asked.count("heartbeat")
    wait_for(lambda: ledger.asked.count("heartbeat") > beats + 5)
    assert heart.answered_at > since
    broker.leave.set()
    lane.close()
    assert broker.rung == [Bell("prefill", "u", 1)]


def test_a_bell_waits_in_line_once_however_long_the_broker_is_away(calls: Calls) -> None:
    broker = StuckBroker()
    lane = BellLane(broker, calls("crash"))
    lane.start()
    first, second = Bell("prefill", "a", 1), Bell("prefill", "b", 1)
    lane.ring(first)
    assert broker.entered.wait(5)
    for _ in range(100):
        lane.ring(second)
        lane.ring(first)  # it may mean something new: the one being rung has been said already
    broker.leave.set()
    lane.close()
    assert broker.rung == [first, second, first]
    assert not lane.alive


def test_a_bug_ends_the_thread_and_is_told(beat: Any, calls: Calls) -> None:
    class Bug(Exception):
        pass

    bug = Bug()

    def broken() -> None:
        raise bug

    heart = beat(after_beat=broken)
    wait_for(lambda: not heart.alive)
    assert ("crash", "heartbeat", bug) in calls.made


def test_what_remains_to_be_said_is_said_again_when_the_ledger_is_back(beat: Any, ledger: Gate, calls: Calls) -> None:
    failures = iter([True, True, False])

    def say() -> None:
        if next(failures, False):
            raise LedgerUnavailable("not yet")
        calls.made.append("said")

    heart = beat(after_beat=say)
    wait_for(lambda: calls.count("said") > 1)
    assert heart.registered
    assert all(call[0] != "crash" for call in calls.made)


def test_beats_tell_the_gauges_of_that_moment(ledger: Gate, calls: Calls) -> None:
    running = iter(range(10**9))
    heart = HeartbeatThread(
        SETTINGS, ledger, NODE, lambda: Gauges(running=next(running)), ring=calls("ring"), on_crash=calls("crash")
    )
    heart.start()
    try:
        wait_for(lambda: (nodes := ledger.execute(Cluster()).nodes) and nodes[0].gauges.running > 2)
    finally:
        heart.close()
    assert Heartbeat.name in ledger.asked


class Refused:
    """A node that the ledger refuses, beating by hand on a clock of its own."""

    def __init__(self, ledger: Gate, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("app.heartbeat.time", SimpleNamespace(monotonic=lambda: self.now))
        self.calls = calls
        self.patience_s = SETTINGS.node_ttl_s + 2
        self.ledger = ledger
        self.other = NodeInfo(incarnation="p", role="prefill", name="p1", pid=1, host="h", model="two")
        self.heart = HeartbeatThread(
            SETTINGS, ledger, NODE, Gauges, ring=calls("ring"), on_crash=calls("crash"), on_refused=calls("refused")
        )
        self.ledger.execute(Register(self.other, 60_000))

    def beat_after(self, seconds: float) -> None:
        self.now += seconds
        self.heart._try_beat()

    @property
    def told(self) -> bool:
        return self.calls.made != []


@pytest.fixture
def refused(ledger: Gate, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Refused:
    return Refused(ledger, calls, monkeypatch)


def test_a_refusal_is_told_only_when_it_has_lasted(refused: Refused) -> None:
    refused.beat_after(0)
    refused.beat_after(refused.patience_s - 0.1)
    assert not refused.told
    refused.beat_after(0.2)
    assert refused.told


def test_a_refusal_that_passed_does_not_count_with_the_next(refused: Refused) -> None:
    refused.beat_after(0)
    refused.ledger.execute(Deregister("p"))
    refused.beat_after(refused.patience_s - 1)
    assert refused.heart.registered
    refused.ledger.store.version = SPOKEN.newest + 1
    refused.beat_after(refused.patience_s - 1)
    assert refused.heart.refusal != ""
    assert not refused.told
