"""A worker's host whose engine and transport fail as told: what ends one pull, and what ends the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import PullError
from app.kv import KVPool
from app.ledger.memory import MemoryLedger
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Cluster, Drain, Work
from app.schemas import KVLocation, SamplingParams
from app.settings import load_settings
from workers.host import NodeHost

STALL_S = 0.5
LOCATION = KVLocation(pid=1, fd=1, incarnation="peer", num_blocks=4, block_bytes=4096, layout="layout")
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
        self._keys.clear()
        return []

    def close(self) -> None:
        self.pool.close()


class Rig:
    """A decode node of its own ledger, without a broker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crashes: list[tuple[str, type[BaseException]]] = []
        self.pulled: list[on.Pulled] = []
        self.pull: Callable[[], None] = lambda: None
        monkeypatch.setattr("workers.host.end_crashed", self._crashed)
        monkeypatch.setattr("app.kv.reader.KVReader.pull", lambda *_: self.pull())
        self.engine = ToyEngine()
        self.ledger = MemoryLedger(lambda: time.time_ns() // 1_000_000)
        settings = load_settings(redis_url="unix:///nowhere/none.sock", heartbeat_s=0.02, engine_stall_s=STALL_S)
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
        found = self.ledger.execute(Cluster()).nodes
        return found[0].gauges.health if found else "silent"

    def give_a_pull(self) -> None:
        self.host._perform([do.Pull("key", LOCATION, (0,), (1,), ("00" * 16,), (0,))])

    def give_a_sequence(self) -> None:
        self.host._perform([do.Start("key", WORK, (0,), num_computed=2, one_token=False)])


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(monkeypatch)
    yield made
    made.host.close()


def wait_for(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        pause.wait(0.005)


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
    leave = threading.Event()
    rig.engine.in_step = rig.pull = lambda: leave.wait(10)  # type: ignore[assignment]
    stay_healthy(rig, 0.1)
    began = time.monotonic()
    rig.give_a_pull() if lane == "mover" else rig.give_a_sequence()
    try:
        wait_for(lambda: rig.crashes)
        assert rig.crashes[0] == (lane, TimeoutError)
        assert time.monotonic() - began >= STALL_S
        assert rig.health() == "healthy", "heartbeats alone would have said so for ever"
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
    assert rig.ledger.execute(Cluster()).nodes == ()
