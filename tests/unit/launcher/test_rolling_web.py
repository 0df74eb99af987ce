"""Web's workers replaced one by one: a real parent that keeps children as gunicorn's arbiter does."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from app.errors import LedgerError, LedgerUnavailable
from app.launcher.rolling import EXIT_REPORT, Rolling, RollingStopped
from app.protocol.commands import ClusterAnswer, ClusterNode
from app.schemas import Gauges, NodeInfo
from app.settings import load_settings
from tests.unit.launcher.conftest import Cluster

ARBITER = f"""
import signal, subprocess, sys
workers, reports = [], []
def start(*words):
    return subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(600)", *words])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN, signal.SIGTTOU])
workers.append(start())
reports.append(start("-m", "{EXIT_REPORT}"))
print("up", flush=True)
while True:
    if signal.sigwait([signal.SIGTTIN, signal.SIGTTOU]) == signal.SIGTTIN:
        workers.append(start())
    elif workers:
        oldest = workers.pop(0)
        oldest.kill()
        oldest.wait()
"""


def is_worker(child: psutil.Process) -> bool:
    try:
        return child.status() != psutil.STATUS_ZOMBIE and EXIT_REPORT not in child.cmdline()
    except psutil.NoSuchProcess:  # ended since it was listed
        return False


class Web:
    """The parent under a supervisor, and a ledger that knows its workers once ``registers`` says so."""

    def __init__(self, cluster: Cluster) -> None:
        self.registers = True
        self.error: LedgerError | None = None
        self.fewest = 1
        """Registered workers, at the worst moment that was looked at."""
        self._cluster = cluster
        self._known: set[int] = set()
        cluster.start("web", ARBITER)
        cluster.supervise_until(lambda: cluster.wrote("web", "up"))
        self.look()

    @property
    def workers(self) -> set[int]:
        children = psutil.Process(self._cluster.supervisor.pids["web"]).children()
        return {child.pid for child in children if is_worker(child)}

    def look(self) -> None:
        """Let those that run register, if they may."""
        self._known = self.workers if self.registers else self._known & self.workers
        self.fewest = min(self.fewest, len(self._known))

    def execute(self, _: object) -> ClusterAnswer:
        if self.error is not None:
            raise self.error
        self.look()
        host = socket.gethostname()
        return ClusterAnswer(
            0,
            tuple(
                ClusterNode(
                    NodeInfo(incarnation=f"w{pid}", role="web", name="w", pid=pid, host=host), Gauges(), "alive", 0
                )
                for pid in self._known
            ),
        )

    def restart(self, within_s: float = 20.0) -> None:
        def wait(at_most_s: float) -> None:
            self._cluster.supervisor.poll(restart=True)
            self._cluster.supervisor.wait(min(at_most_s, 0.05))
            self.look()

        ledger: Any = self
        settings = load_settings(drain_timeout_s=5.0, web_workers=1)
        Rolling(self._cluster.supervisor, ledger, settings, within_s, wait, self._cluster.said.append).restart(["web"])


@pytest.fixture
def web(cluster: Cluster) -> Web:
    return Web(cluster)


@pytest.fixture
def settled(web: Web, cluster: Cluster) -> Callable[[int], None]:
    """Waits until so many workers run."""
    return lambda count: cluster.supervise_until(lambda: len(web.workers) == count)


def test_a_web_worker_goes_only_when_its_successor_serves(web: Web, settled: Callable[[int], None]) -> None:
    before = web.workers
    web.restart()
    settled(1)
    assert not web.workers & before
    assert web.fewest == 1


def test_a_new_web_worker_that_does_not_come_costs_none_that_serves(web: Web, settled: Callable[[int], None]) -> None:
    before = web.workers
    web.registers = False
    with pytest.raises(RollingStopped, match="a new web worker"):
        web.restart(within_s=0.5)
    settled(2)
    assert before < web.workers
    web.registers = True
    web.restart()
    settled(1)
    assert not web.workers & before, "the next restart leaves as many as there should be"
    assert web.fewest == 1


def test_without_a_ledger_nothing_is_restarted(web: Web, settled: Callable[[int], None]) -> None:
    before = web.workers
    web.error = LedgerUnavailable("out of reach")
    with pytest.raises(RollingStopped, match="out of reach"):
        web.restart()
    assert web.workers == before
