"""Children restarted one by one: real processes, and a ledger that lists whoever has been started."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from app.launcher.lock import only_one
from app.launcher.progress import RestartFailed, restart, told
from app.launcher.rolling import Rolling, RollingStopped
from app.launcher.wakeup import Wakeup
from app.protocol.commands import Cluster as Nodes
from app.protocol.commands import ClusterAnswer, ClusterNode
from app.schemas import Gauges, NodeInfo
from app.settings import Settings, load_settings
from tests.unit.launcher.conftest import Cluster
from tests.waiting import wait_for

WORKER = "print('up', flush=True); import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(15, signal.SIG_IGN); {WORKER}"


class Listing:
    """A ledger that knows each node that runs, but for those of ``missing`` names."""

    def __init__(self, cluster: Cluster) -> None:
        self.missing: set[str] = set()
        self.log: list[dict[str, int]] = []
        self._cluster = cluster

    def execute(self, command: Nodes) -> ClusterAnswer:
        supervisor = self._cluster.supervisor
        self.log.append(supervisor.pids)
        shown = [
            ClusterNode(NodeInfo(incarnation=inc, role="decode", name=name, pid=1, host="h"), Gauges(), "alive", 0)
            for name, inc in supervisor.incarnations.items()
            if name not in self.missing
        ]
        return ClusterAnswer(0, tuple(shown))


def rolling(cluster: Cluster, ledger: Any, within_s: float = 20.0, drain_s: float = 5.0) -> Rolling:
    def wait(at_most_s: float) -> None:
        cluster.supervisor.poll(restart=True)
        cluster.supervisor.wait(min(at_most_s, 0.05))

    settings = load_settings(drain_timeout_s=drain_s)
    return Rolling(cluster.supervisor, ledger, settings, within_s, wait, cluster.said.append)


def start(cluster: Cluster, *names: str, code: str = WORKER) -> dict[str, int]:
    for name in names:
        cluster.start(name, code, is_node=name != "beat")
    cluster.supervise_until(lambda: all(cluster.wrote(name, "up") for name in names))
    return cluster.supervisor.pids


def test_each_is_restarted_only_when_the_one_before_it_is_back(cluster: Cluster) -> None:
    before = start(cluster, "one", "two", "beat")
    ledger = Listing(cluster)
    rolling(cluster, ledger).restart(["one", "two", "beat"])
    after = cluster.supervisor.pids
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert [ended.name for ended in cluster.exits] == ["one", "two", "beat"]
    assert all(pids["two"] == before["two"] for pids in ledger.log if pids.get("one") == before["one"])
    assert all(len(pids) >= 2 for pids in ledger.log), "two at once"


def test_a_successor_that_does_not_come_ends_the_restart_and_the_others_run_on(cluster: Cluster) -> None:
    before = start(cluster, "one", "two")
    ledger = Listing(cluster)
    ledger.missing = {"one"}
    with pytest.raises(RollingStopped, match="one to be ready again"):
        rolling(cluster, ledger, within_s=1.0).restart(["one", "two"])
    assert cluster.supervisor.pids["two"] == before["two"]


def test_one_that_does_not_stop_is_killed_and_the_restart_goes_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.launcher.rolling._ENDING_S", 0.2)
    before = start(cluster, "stubborn", code=STUBBORN)
    rolling(cluster, Listing(cluster), drain_s=0.1).restart(["stubborn"])
    assert cluster.supervisor.pids["stubborn"] != before["stubborn"]
    assert [ended.reason for ended in cluster.exits] == ["SIGKILL"]


def test_what_has_just_died_by_itself_is_waited_for(cluster: Cluster) -> None:
    before = start(cluster, "one")
    os.kill(before["one"], signal.SIGKILL)
    cluster.supervise_until(lambda: bool(cluster.exits))
    rolling(cluster, Listing(cluster)).restart(["one"])
    assert cluster.supervisor.pids["one"] != before["one"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "run").mkdir()
    return load_settings(home=tmp_path)


def follow(settings: Settings, lines: list[str]) -> tuple[threading.Thread, list[RestartFailed]]:
    """Run ``baton restart`` beside the test, which is the launcher."""
    failures: list[RestartFailed] = []

    def run() -> None:
        try:
            restart(settings, lines.append)
        except RestartFailed as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failures


def test_a_restart_is_asked_for_by_a_signal_and_followed_to_its_end(settings: Settings) -> None:
    lines: list[str] = []
    said: list[str] = []
    run = settings.home / "run"
    with only_one(run / "lock"), Wakeup.listen() as wakeup:
        thread, failures = follow(settings, lines)
        wait_for(lambda: wakeup.restarts == 1, 10)
        second, refusals = follow(settings, said)
        second.join(5)
        assert [str(refusal) for refusal in refusals] == ["a restart is under way already"]
        with told(run, said.append) as tell:
            tell("restarting one")
        thread.join(5)
        assert (lines, said, failures) == (["restarting one"], ["restarting one"], [])

        thread, failures = follow(settings, lines)
        wait_for(lambda: wakeup.restarts == 2, 10)
        with pytest.raises(RollingStopped), told(run, said.append):
            raise RollingStopped("waited 3 s for one")
        thread.join(5)
        assert [str(failure) for failure in failures] == ["failed: waited 3 s for one"]
        assert wakeup.stops == 0
    assert list(run.iterdir()) == []


def test_a_restart_needs_a_launcher_and_notices_its_end(settings: Settings) -> None:
    with pytest.raises(RestartFailed, match="no `baton up` runs"):
        restart(settings, print)
    with Wakeup.listen() as wakeup:
        with only_one(settings.home / "run" / "lock"):
            thread, failures = follow(settings, [])
            wait_for(lambda: wakeup.restarts == 1, 10)
        thread.join(5)
    assert [str(failure) for failure in failures] == ["`baton up` has ended"]
