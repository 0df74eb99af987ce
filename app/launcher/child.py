"""One child of the launcher: spawned in a session of its own, reaped, killed with its whole process group."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.errors import StartupError
from app.ids import draw_id
from app.parent_death import tied_to_parent

_LOG_KEPT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ChildSpec:
    """What to run.

    Attributes:
        argv: an absolute path and its arguments.
        stop_stage: children of a lower stage are stopped first.
        is_node: it gets a fresh BATON_INCARNATION at each start, and its exit is reported under it.
        hurries: SIGQUIT makes it end, or hand back, at once what SIGTERM lets it finish.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    stop_stage: int = 0
    is_node: bool = False
    hurries: bool = False


@dataclass(frozen=True)
class ChildExit:
    """How a child ended. ``returncode`` as subprocess has it: negative for a signal."""

    spec: ChildSpec
    incarnation: str
    returncode: int
    ran_for_s: float

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def reason(self) -> str:
        if self.returncode >= 0:
            return f"exit status {self.returncode}"
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"


class Child:
    """A running child. Spawn it from the main thread (see app/parent_death.py)."""

    def __init__(self, spec: ChildSpec, cwd: Path, log: Path) -> None:
        """Start it.

        Raises:
            StartupError: the operating system refused.
        """
        self.spec = spec
        self.incarnation = draw_id() if spec.is_node else ""
        self.started_at = time.monotonic()
        env = dict(spec.env)
        if spec.is_node:
            env["BATON_INCARNATION"] = self.incarnation
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    tied_to_parent(spec.argv, signal.SIGKILL),
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
                )
        except OSError as error:
            raise StartupError(f"{spec.name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> ChildExit | None:
        """Say how it ended, once it has; whatever it left in its process group is killed then."""
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # Before it is reaped its pid, and so the group's, cannot belong to anybody else.
        self.kill()
        returncode = self._process.wait()
        return ChildExit(self.spec, self.incarnation, returncode, time.monotonic() - self.started_at)

    def terminate(self) -> None:
        """Ask it, and not its children, to stop. Only before ``poll`` has reaped it."""
        self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send it, and not its children, a signal. Only before ``poll`` has reaped it."""
        os.kill(self.pid, number)

    def hurry(self) -> None:
        """Tell it and its children to finish nothing any more. Only before ``poll`` has reaped it."""
        os.killpg(self.pid, signal.SIGQUIT)

    def kill(self) -> None:
        """End it and everything in its process group. Only before ``poll`` has reaped it."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it was spawned this instant and has no group yet
            os.kill(self.pid, signal.SIGKILL)


def trim_log(log: Path) -> None:
    """Move a log that has grown large to ``….1``. The child keeps appending to the same, now empty, file."""
    if log.exists() and log.stat().st_size > _LOG_KEPT_BYTES:
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)


def new_log(log: Path) -> None:
    """Begin a log; that of the launcher's last run is kept as ``….1``."""
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    log.touch(mode=0o600)


def last_lines(log: Path, count: int = 12) -> list[str]:
    """The end of a log, for a person who has to know why a child did not start."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16_384))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]
