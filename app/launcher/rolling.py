"""A rolling restart: one process at a time, each only once its successor serves. The ledger is left alone."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import psutil

from app.errors import BatonError, LedgerError, LedgerForeign
from app.launcher.readiness import answers, missing_nodes
from app.launcher.supervisor import Supervisor
from app.launcher.wakeup import Deadline
from app.ledger import Ledger
from app.protocol.commands import Cluster
from app.settings import Settings

_LOOK_EVERY_S = 0.25
_ENDING_S = 5.0
"""What a process takes to end after its drain."""

EXIT_REPORT = "web.report_exit"
"""A child of gunicorn's arbiter that is none of its workers."""

Say = Callable[[str], None]


class RollingStopped(BatonError):
    """A restart went no further: what has not been restarted yet still runs as before."""


class Rolling:
    """Restarts children of a supervisor, which starts again whatever has ended.

    Args:
        names: which, in this order; web is restarted by replacing its workers, its port stays open meanwhile.
        successor_within_s: how long a successor may take to be ready.
        wait: one look at the children; raises when somebody asked to stop.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        ledger: Ledger,
        settings: Settings,
        successor_within_s: float,
        wait: Callable[[float], None],
        say: Say,
    ) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        self._settings = settings
        self._within_s = successor_within_s
        self._wait = wait
        self._say = say

    def restart(self, names: list[str]) -> None:
        """Restart them one after the other.

        Raises:
            RollingStopped: one did not end, or its successor did not come.
        """
        self._look_at_ledger()
        for name in names:
            self._say(f"restarting {name}")
            if name == "web":
                self._restart_web()
            else:
                self._restart(name)

    def _look_at_ledger(self) -> None:
        """Without it nobody here can see whether a successor serves."""
        try:
            self._ledger.execute(Cluster())
        except LedgerForeign as error:
            raise RollingStopped(f"this `baton up` is of an older release, start it anew: {error}") from error
        except LedgerError as error:
            raise RollingStopped(str(error)) from error

    def _restart(self, name: str) -> None:
        pid = self._supervisor.pids.get(name)
        if pid is not None:  # else it has just ended by itself, and its successor is waited for all the same
            self._supervisor.send(name, signal.SIGTERM)
            drained = Deadline(self._settings.drain_timeout_s + _ENDING_S)
            while self._supervisor.pids.get(name) == pid and not drained.passed:
                self._wait(_LOOK_EVERY_S)
            if self._supervisor.pids.get(name) == pid:
                self._say(f"{name} did not stop in time: killed")
                self._supervisor.kill(name)
            self._until(f"{name} to end", lambda: self._supervisor.pids.get(name) != pid, _ENDING_S)
        self._until(f"{name} to be ready again", lambda: self._serves(name))

    def _serves(self, name: str) -> bool:
        if name not in self._supervisor.pids:
            return False
        if name == "flower":
            return answers(self._settings.flower_host, self._settings.flower_port, "/healthcheck")
        incarnation = self._supervisor.incarnations.get(name)
        return incarnation is None or not missing_nodes(self._ledger, {name: incarnation})

    def _restart_web(self) -> None:
        """gunicorn takes a worker more (SIGTTIN), then lets the oldest go (SIGTTOU), once for each. The port belongs to
        its arbiter, which stays: there is no moment at which nobody listens."""
        wanted, there = self._settings.web_workers, len(self._web_workers())
        for _ in range(max(wanted, there)):
            self._replace_oldest_of(self._web_workers())
        for _ in range(there - wanted):  # one more each time that an earlier restart waited in vain for a new one
            self._tell_web(signal.SIGTTOU)

    def _replace_oldest_of(self, before: set[int]) -> None:
        self._tell_web(signal.SIGTTIN)
        # If it does not come, the others stay: gunicorn would let go of one that serves.
        self._until("a new web worker", lambda: bool(self._registered(self._web_workers() - before)))
        self._tell_web(signal.SIGTTOU)
        within_s = self._settings.drain_timeout_s + _ENDING_S
        self._until("the oldest web worker to end", lambda: not before <= self._web_workers(), within_s)

    def _tell_web(self, number: signal.Signals) -> None:
        if "web" not in self._supervisor.pids:
            raise RollingStopped("web has just ended by itself")
        self._supervisor.send("web", number)

    def _web_workers(self) -> set[int]:
        try:
            children = psutil.Process(self._supervisor.pids["web"]).children()
        except (KeyError, psutil.NoSuchProcess):
            raise RollingStopped("web has just ended by itself") from None
        return {child.pid for child in children if _is_web_worker(child)}

    def _registered(self, pids: set[int]) -> set[int]:
        try:
            nodes = [entry.node for entry in self._ledger.execute(Cluster()).nodes if entry.state == "alive"]
        except LedgerError:
            return set()
        return {node.pid for node in nodes if node.role == "web" and node.host == socket.gethostname()} & pids

    def _until(self, what: str, condition: Callable[[], bool], within_s: float | None = None) -> None:
        within_s = self._within_s if within_s is None else within_s
        deadline = Deadline(within_s)
        while not condition():
            if deadline.passed:
                raise RollingStopped(f"waited {within_s:g} s for {what}")
            self._wait(_LOOK_EVERY_S)


def _is_web_worker(child: psutil.Process) -> bool:
    try:
        return EXIT_REPORT not in child.cmdline()
    except psutil.NoSuchProcess:  # ended, reaped or not
        return False
