"""A worker's host whose engine and transport fail as told: what ends one pull, what ends the process, and how."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import LedgerUnavailable, PullError
from app.kv import KVPool
from app.ledger.memory import MemoryLedger
from app.link import Link
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import (
    Activate,
    Admit,
    Claim,
    Cluster,
    Deregister,
    Drain,
    Emit,
    Heartbeat,
    Holdings,
    Limits,
    Register,
    ReserveNext,
    Watcher,
    Work,
)
from app.protocol.messages import PullResult
from app.schemas import KVLocation, NodeInfo, SamplingParams
from app.settings import load_settings
from tests.waiting import wait_for
from workers.host import NodeHost

STALL_S = 0.5
HEARTBEAT_S = 0.02
LAST_WORDS_S = 3.0
"""A ledger call that is not answered takes 2 s."""
LOCATION = KVLocation(pid=1, fd=1, incarnation="peer", num_blocks=4, block_bytes=4096, layout="layout")
LIMITS = Limits(3, 10, 60_000, 60_000, 60_000)
WORK = Work("u", "u", 1, "f", (5, 6), (7,), SamplingParams(seed=1, max_tokens=4))


class ToyEngine:
    """What a host asks of an engine; a step does what the test says, and ends every sequence."""

    staged = False
    block_size_tokens = 16
    layout = "layout"
    folder = SimpleNamespace(fingerprint="model", config=SimpleNamespace(eos_token_ids=(0,)))

    def __init__(self) -> None:
        self.pool = KVPool.create(4, 4096, "me", self.layout)
        self.in_step: Callable[[], object] = lambda: None
        self.steps = 1
        """Steps until every sequence has ended."""
        self._keys: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, *_: Any, **__: Any) -> None:
        self._keys.append(key)

    def step(self, on_start: Callable[[Sequence[str]], None]) -> list[Any]:
        on_start(self._keys)
        self.in_step()
        self.steps -= 1
        if self.steps <= 0:
            self._keys.clear()
        return []

    def close(self) -> None:
        self.pool.close()


class Journal(MemoryLedger):
    """A ledger that remembers what it was told; it can be out of reach."""

    def __init__(self) -> None:
        super().__init__(lambda: time.time_ns() // 1_000_000)
        self.told: list[Any] = []
        self.away = False

    def apply(self, command: Any, not_after_ms: int) -> Any:
        if self.away:
            raise LedgerUnavailable("out of reach")
        answer = super().apply(command, not_after_ms)
        self.told.append(command)
        return answer


class Rig:
    """A decode node of its own ledger, without a broker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, check_s: float) -> None:
        """With a long ``check_s`` what only the ledger gives this node stays with it."""
        self.crashes: list[tuple[str, type[BaseException]]] = []
        self.last_resorts: list[float] = []
        self.pulled: list[on.Pulled] = []
        self.pull: Callable[[], None] = lambda: None
        monkeypatch.setattr("workers.emergency.end_crashed", self._crashed)
        monkeypatch.setattr("workers.emergency.end_in", self.last_resorts.append)
        monkeypatch.setattr("app.kv.reader.KVReader.pull", lambda *_: self.pull())
        self.engine = ToyEngine()
        self.ledger = Journal()
        self.ledger.execute(Register(NodeInfo(incarnation="w", role="web", name="w", pid=1, host="h"), 60_000))
        prefill = NodeInfo(
            incarnation="p", role="prefill", name="p", pid=1, host="h", model="model", layout="layout", num_blocks=4
        )
        self.ledger.execute(Register(prefill, 60_000))
        settings = load_settings(
            redis_url="unix:///nowhere/none.sock",
            heartbeat_s=HEARTBEAT_S,
            engine_stall_s=STALL_S,
            check_s=check_s,
        )
        engine: Any = self.engine
        self.host = NodeHost(settings, "decode", "decode1@h", engine, "me", self.ledger, lambda: None)
        post = self.host._post

        def hear(event: on.Event) -> None:
            if isinstance(event, on.Pulled):
                self.pulled.append(event)
            post(event)

        monkeypatch.setattr(self.host, "_post", hear)
        self.host.start()

    def _crashed(self, nodename: str, lane: str, error: BaseException) -> None:
        """In a worker the process ends here."""
        self.crashes.append((lane, type(error)))

    def health(self) -> str:
        """What the last heartbeat said."""
        found = {node.node.incarnation: node.gauges.health for node in self.ledger.execute(Cluster()).nodes}
        return found.get("me", "unknown")

    def lease(self, uid: str, *, active: bool) -> str:
        """Have the ledger give this node a lease; ``active``: of a request that decodes."""
        limits = Limits(3, 10, 60_000, 60_000, 60_000)
        sampling = SamplingParams(seed=1, max_tokens=4)
        self.ledger.execute(Admit(uid, uid, (5, 6), sampling, Watcher("w", uid), limits))
        self.ledger.execute(Claim(uid, "p", f"fence-{uid}", 4, 16))
        self.ledger.execute(ReserveNext(uid, "me", f"lease-{uid}", 4, 16))
        if active:
            self.ledger.execute(Emit(uid, 1, f"fence-{uid}", "p", 0, (7,)))
            self.ledger.execute(Activate(uid, 1, f"fence-{uid}", f"lease-{uid}", "me", 0, 7))
        return f"lease-{uid}"

    def record(self, uid: str) -> tuple[str, int, int, int]:
        """State, attempt, failures, and how many of its tokens the ledger holds."""
        found = self.ledger.store.records[uid]
        return found.state.value, found.attempt, found.failures, len(found.tokens)

    def give_a_pull(self, key: str = "key") -> None:
        self.host._perform([do.Pull(key, LOCATION, (0,), (1,), ("00" * 16,), (0,))])

    def give_a_sequence(self) -> None:
        self.host._perform([do.Start("key", WORK, (0,), num_computed=2, one_token=False)])


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(monkeypatch, check_s=60)
    wait_for(lambda: any(isinstance(command, Holdings) for command in made.ledger.told))
    yield made
    made.host.close()


@pytest.fixture
def comparing_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """One that compares what it holds with what the ledger gives it, as often as production does."""
    made = Rig(monkeypatch, check_s=1)
    yield made
    made.host.close()


def stay_healthy(rig: Rig, for_s: float) -> None:
    """Every heartbeat of this time says so."""
    until = time.monotonic() + for_s
    wait_for(lambda: rig.health() == "healthy")
    wait_for(lambda: rig.health() != "healthy" or rig.crashes or time.monotonic() > until, for_s + 5)
    assert (rig.crashes, rig.health()) == ([], "healthy")


def test_a_node_that_idles_is_healthy_before_its_first_work_and_after_it(rig: Rig) -> None:
    stay_healthy(rig, 1.5 * STALL_S)
    rig.give_a_sequence()
    rig.give_a_pull()
    wait_for(lambda: rig.pulled and not rig.engine.has_work)
    stay_healthy(rig, 1.5 * STALL_S)


def test_a_pull_that_fails_is_told_and_the_next_one_works(rig: Rig) -> None:
    def refuse() -> None:
        raise PullError("not those blocks", reason="generation")

    rig.pull = refuse
    rig.give_a_pull()
    wait_for(lambda: rig.pulled)
    assert rig.pulled == [on.Pulled("key", "generation", "not those blocks")]
    stay_healthy(rig, 1.5 * STALL_S)
    rig.pull = lambda: None
    rig.give_a_pull()
    wait_for(lambda: len(rig.pulled) == 2)
    assert rig.pulled[1] == on.Pulled("key")


def broken() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("lane", ["mover", "engine"])
def test_an_exception_that_nobody_foresaw_ends_the_process(rig: Rig, lane: str) -> None:
    rig.pull, rig.engine.in_step = broken, broken
    rig.give_a_pull() if lane == "mover" else rig.give_a_sequence()
    wait_for(lambda: rig.crashes)
    assert rig.crashes[0] == (lane, ZeroDivisionError)


@pytest.mark.parametrize("lane", ["mover", "engine"])
def test_a_lane_without_progress_ends_the_process_though_heartbeats_go_on(rig: Rig, lane: str) -> None:
    with stuck(rig):
        stay_healthy(rig, 0.1)
        began = time.monotonic()
        rig.give_a_pull() if lane == "mover" else rig.give_a_sequence()
        wait_for(lambda: rig.crashes)
        assert rig.crashes == [(lane, TimeoutError)]
        assert time.monotonic() - began >= STALL_S
        assert rig.last_resorts[-1] <= LAST_WORDS_S, "nothing that is still to be said holds the end up for longer"
        assert healths(rig)[-1] == "unhealthy"
        assert healths(rig) == sorted(healths(rig)), "once unhealthy, never healthy again"
        assert rig.health() == "unknown", "what has left the ledger is given nothing more"
        assert not rig.host.wants_bells


def test_a_long_prefill_that_progresses_chunk_by_chunk_never_makes_its_node_unhealthy(rig: Rig) -> None:
    pause = threading.Event()
    rig.engine.steps = 20
    rig.engine.in_step = lambda: pause.wait(STALL_S / 5)
    rig.give_a_sequence()
    wait_for(lambda: rig.engine.has_work)
    stay_healthy(rig, 3 * STALL_S)
    wait_for(lambda: not rig.engine.has_work)
    assert healths(rig).count("healthy") == len(healths(rig))


def test_many_pulls_in_a_row_are_progress_though_together_they_take_long(rig: Rig) -> None:
    pause = threading.Event()
    rig.pull = lambda: pause.wait(STALL_S / 5)  # type: ignore[assignment]
    for number in range(15):
        rig.give_a_pull(str(number))
    stay_healthy(rig, 2 * STALL_S)
    wait_for(lambda: len(rig.pulled) == 15)
    assert rig.crashes == []


def test_a_stuck_pull_has_failed_and_all_else_goes_back_uncounted_without_losing_a_token(rig: Rig) -> None:
    rig.lease("running", active=True)
    rig.lease("waiting", active=False)
    with stuck(rig):
        rig.give_a_pull(rig.lease("pulled", active=False))
        wait_for(lambda: rig.crashes)
    assert rig.record("running") == ("QUEUED", 2, 0, 1)
    assert rig.record("waiting") == ("QUEUED", 2, 0, 0)
    assert rig.record("pulled") == ("QUEUED", 2, 1, 0)


def test_a_stuck_step_is_a_failure_of_what_was_in_it_and_of_nothing_else(rig: Rig) -> None:
    rig.lease("running", active=True)
    rig.lease("waiting", active=False)
    with stuck(rig):
        rig.give_a_sequence()
        wait_for(lambda: rig.crashes)
    assert rig.record("running") == ("QUEUED", 2, 1, 1)
    assert rig.record("waiting") == ("QUEUED", 2, 0, 0)


def test_a_node_thread_that_is_stuck_ends_the_process_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.lease("running", active=True)
    leave = threading.Event()
    monkeypatch.setattr(rig.host._machine, "receive", lambda *_: leave.wait(10) and [])
    rig.host._post(on.LedgerRestarted())
    try:
        wait_for(lambda: rig.crashes)
    finally:
        leave.set()
    assert rig.crashes == [("node", TimeoutError)]
    assert rig.record("running")[0] == "QUEUED"


def test_a_ledger_that_is_away_does_not_keep_a_broken_node_alive(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(lambda: rig.host.wants_bells)
    rig.ledger.away = True
    rig.engine.in_step = broken
    rig.give_a_sequence()
    wait_for(lambda: rig.crashes)
    assert rig.crashes == [("engine", ZeroDivisionError)]
    shown = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(rig.host._machine, "audit", shown.set)  # runs when the node is shown idle again
        rig.host._idle = False
        rig.host._post(on.Stopped("nothing"))
        assert shown.wait(5)
    threading.Event().wait(5 * HEARTBEAT_S)
    assert not rig.host.wants_bells, "it takes nothing more"
    assert rig.last_resorts[-1] <= LAST_WORDS_S, "the watchdog, which still looks, does not put the end off"


def test_a_node_that_ends_says_so_once_however_many_of_its_parts_fail(rig: Rig) -> None:
    rig.pull, rig.engine.in_step = broken, broken
    rig.give_a_pull()
    rig.give_a_sequence()
    wait_for(lambda: not rig.host._engine_lane.alive and not rig.host._mover_lane.alive)
    wait_for(lambda: rig.crashes)
    assert len(rig.crashes) == 1


def test_a_node_that_was_told_to_stop_is_watched_no_more(rig: Rig) -> None:
    rig.host.close()
    assert rig.crashes == []
    assert not rig.host._watchdog._thread.is_alive()


def test_the_death_of_a_peer_never_makes_this_node_unhealthy(rig: Rig) -> None:
    peer = Link("p", "127.0.0.1", lambda *_: None, lambda *_: None)
    address = peer.address
    peer.close()
    ended: list[on.CallEnded] = []
    post = rig.host._post
    rig.host._post = lambda event: ended.append(event) if isinstance(event, on.CallEnded) else post(event)  # type: ignore[method-assign]
    message = PullResult(uid="u", attempt=1, fence="f", lease_id="l", activated=True)
    for tag in range(5):
        rig.host._perform([do.Call(-1 - tag, address, "p", message, timeout_s=0.1)])
    wait_for(lambda: len(ended) == 5)
    assert all(end.reply is None for end in ended)
    stay_healthy(rig, 2 * STALL_S)


def healths(rig: Rig) -> list[str]:
    return [command.gauges.health for command in rig.ledger.told if isinstance(command, Heartbeat)]


@contextmanager
def stuck(rig: Rig) -> Iterator[None]:
    """Steps and pulls that are entered here are left when this is."""
    leave = threading.Event()
    rig.engine.in_step = rig.pull = lambda: leave.wait(10)  # type: ignore[assignment]
    try:
        yield
    finally:
        leave.set()


def test_a_node_that_the_ledger_was_asked_to_drain_says_so_and_stops_at_once_when_it_must(rig: Rig) -> None:
    wait_for(lambda: rig.health() == "healthy" and rig.host.wants_bells)
    rig.ledger.execute(Drain("me"))
    wait_for(lambda: rig.health() == "drained")
    assert not rig.host.wants_bells
    began_at = time.monotonic()
    assert rig.host.drain(timeout_s=30)
    assert time.monotonic() - began_at < 1
    assert rig.health() == "unknown"


def test_a_node_is_drained_only_once_it_holds_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(type(rig.host._machine), "idle", False)
        rig.ledger.execute(Drain("me"))
        wait_for(lambda: rig.health() not in ("healthy", "unknown"))
        assert rig.health() == "draining"
        assert not rig.host._wait_idle(0)
    rig.host._post(on.Stopped("nothing"))
    wait_for(lambda: rig.health() == "drained")


def test_what_the_ledger_gives_a_draining_node_late_is_handed_back_before_it_leaves(comparing_rig: Rig) -> None:
    rig = comparing_rig
    machine: Any = rig.host._machine
    wait_for(lambda: machine._check_due == 1 and not machine._checking)  # the next comparison is a second away
    rig.lease("u", active=False)
    assert rig.host.drain(timeout_s=10)
    assert rig.health() == "unknown"
    assert rig.record("u")[:3] == ("QUEUED", 2, 0)


def test_what_ends_with_a_drain_is_no_emergency_however_long_the_ledger_takes(rig: Rig) -> None:
    """The heartbeat is over before the node leaves the registry; the watchdog would look many times meanwhile."""
    wait_for(lambda: rig.host.wants_bells)
    apply = rig.ledger.apply

    def slow(command: Any, not_after_ms: int) -> Any:
        if isinstance(command, Deregister):
            threading.Event().wait(20 * HEARTBEAT_S)
        return apply(command, not_after_ms)

    rig.ledger.apply = slow  # type: ignore[method-assign]
    assert rig.host.drain(5)
    assert rig.crashes == []
    assert rig.health() == "unknown"
