"""Keeps children alive: sees an exit at once, reports it, restarts after a growing delay; stops them in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from app.errors import StartupError
from app.launcher.backoff import Backoff, BackoffPolicy
from app.launcher.child import Child, ChildExit, ChildSpec, new_log, trim_log
from app.launcher.wakeup import Deadline, Wakeup

_TRIM_EVERY_S = 60.0
_KILL_TAKES_S = 2.0


class Supervisor:
    """Owns the children. Everything runs in the caller's (main) thread, in ``poll`` and ``stop``.

    Args:
        wakeup: what to wait on; SIGCHLD ends a wait.
        cwd: where children run.
        logs: folder for ``<name>.log``.
        on_exit: called with each exit before anything else happens; must not block.
        say: prints one line for a person.
    """

    def __init__(
        self,
        wakeup: Wakeup,
        cwd: Path,
        logs: Path,
        on_exit: Callable[[ChildExit], None],
        say: Callable[[str], None],
        policy: BackoffPolicy = BackoffPolicy(),  # noqa: B008 (frozen)
    ) -> None:
        self._wakeup = wakeup
        self._cwd = cwd
        self._logs = logs
        self._on_exit = on_exit
        self._say = say
        self._policy = policy
        self._children: dict[str, Child] = {}
        self._waiting: dict[str, tuple[float, ChildSpec]] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._trimmed_at = time.monotonic()

    def log_of(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    @property
    def incarnations(self) -> dict[str, str]:
        """Name → incarnation of each running node."""
        return {name: child.incarnation for name, child in self._children.items() if child.spec.is_node}

    @property
    def pids(self) -> dict[str, int]:
        """Name → process id of each running child."""
        return {name: child.pid for name, child in self._children.items()}

    def start(self, spec: ChildSpec) -> None:
        """Start a child for the first time, with a new log.

        Raises:
            StartupError: the operating system refused.
        """
        new_log(self.log_of(spec.name))
        self._backoffs[spec.name] = Backoff(self._policy)
        self._spawn(spec)

    def poll(self, *, restart: bool) -> list[ChildExit]:
        """Reap what ended and start what is due; return what ended since the last call.

        With ``restart`` false an exit is final: during the start phase it means that something is wrong.
        """
        exits = self._reap()
        if restart:
            for ended in exits:
                self._schedule(ended)
            self._start_due()
        if time.monotonic() - self._trimmed_at > _TRIM_EVERY_S:
            self._trimmed_at = time.monotonic()
            for name in self._children:
                trim_log(self.log_of(name))
        return exits

    def wait(self, at_most_s: float) -> None:
        """Wait for a signal (a child's end is one) or the next restart that is due."""
        due = min((at for at, _ in self._waiting.values()), default=None)
        left_s = at_most_s if due is None else min(at_most_s, due - time.monotonic())
        self._wakeup.wait(left_s)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a running child, and not its children, a signal. What has ended is known after ``poll``."""
        self._children[name].send(number)

    def kill(self, name: str) -> None:
        """End a running child and everything in its process group."""
        self._children[name].kill()

    def stop(self, budgets_s: dict[int, float], hurry_after_s: float | None = None) -> None:
        """Stop all children, stage by stage: SIGTERM, then SIGKILL once the stage's budget is spent.

        ``hurry_after_s``: SIGQUIT so long after SIGTERM, to the process groups of those that hurry. Another request
        to stop while this runs kills what is left at once.
        """
        self._waiting.clear()
        stops_before = self._wakeup.stops
        for stage in sorted({child.spec.stop_stage for child in self._children.values()}):
            names = [name for name, child in self._children.items() if child.spec.stop_stage == stage]
            self._stop_stage(names, Deadline(budgets_s[stage]), hurry_after_s, stops_before)

    def _stop_stage(
        self, names: Iterable[str], deadline: Deadline, hurry_after_s: float | None, stops_before: int
    ) -> None:
        self._reap()  # nothing below may signal a process that is gone
        left = [self._children[name] for name in names if name in self._children]
        for child in left:
            child.terminate()
        if hurry_after_s is not None:
            left = self._wait_for_ends(left, Deadline(min(hurry_after_s, deadline.left_s)), stops_before)
            for child in left:
                if child.spec.hurries:
                    child.hurry()
        left = self._wait_for_ends(left, deadline, stops_before)
        for child in left:
            if self._wakeup.stops == stops_before:
                self._say(f"{child.spec.name} did not stop in time: killed")
            child.kill()
        killed = Deadline(_KILL_TAKES_S)
        while left and not killed.passed:
            self._wakeup.wait(killed.left_s)
            left = self._still_running(left)
        for child in left:
            self._say(f"{child.spec.name} (pid {child.pid}) cannot be killed: the kernel holds it")

    def _wait_for_ends(self, left: list[Child], deadline: Deadline, stops_before: int) -> list[Child]:
        while left and not deadline.passed and self._wakeup.stops == stops_before:
            self._wakeup.wait(deadline.left_s)
            left = self._still_running(left)
        return left

    def _still_running(self, children: list[Child]) -> list[Child]:
        self._reap()
        return [child for child in children if child.spec.name in self._children]

    def _spawn(self, spec: ChildSpec) -> None:
        self._children[spec.name] = Child(spec, self._cwd, self.log_of(spec.name))

    def _reap(self) -> list[ChildExit]:
        exits = []
        for name, child in list(self._children.items()):
            ended = child.poll()
            if ended is not None:
                del self._children[name]
                self._on_exit(ended)
                exits.append(ended)
        return exits

    def _schedule(self, ended: ChildExit) -> None:
        delay_s = self._backoffs[ended.name].delay_after(ended.ran_for_s)
        self._waiting[ended.name] = (time.monotonic() + delay_s, ended.spec)
        self._say(f"{ended.name} ended ({ended.reason}): starting it again in {delay_s:g} s")

    def _start_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, (at, _) in self._waiting.items() if at <= now]:
            _, spec = self._waiting.pop(name)
            try:
                self._spawn(spec)
            except StartupError as error:  # no memory or no process left: that may pass
                delay_s = self._backoffs[name].delay_after(0.0)
                self._waiting[name] = (now + delay_s, spec)
                self._say(f"{error}; trying again in {delay_s:g} s")
            else:
                self._say(f"{name} started again (pid {self._children[name].pid})")
