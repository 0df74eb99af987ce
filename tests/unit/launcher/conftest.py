"""Small real programs as children, and a supervisor that is always stopped."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.launcher.backoff import BackoffPolicy
from app.launcher.child import ChildExit, ChildSpec
from app.launcher.supervisor import Supervisor
from app.launcher.wakeup import Wakeup
from tests.waiting import wait_for

Until = Callable[[Callable[[], bool]], None]


class Cluster:
    """A supervisor over Python one-liners, with a record of what it said and reported."""

    def __init__(self, folder: Path, wakeup: Wakeup, policy: BackoffPolicy) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.exits: list[ChildExit] = []
        self.wakeup = wakeup
        self.supervisor = Supervisor(wakeup, folder, folder, self.exits.append, self.said.append, policy)

    def start(self, name: str, code: str, *, stage: int = 0, is_node: bool = False, hurries: bool = False) -> ChildSpec:
        argv = (sys.executable, "-I", "-c", code)
        spec = ChildSpec(name, argv, {"PATH": "/usr/bin"}, stage, is_node, hurries)
        self.supervisor.start(spec)
        return spec

    def supervise_until(self, condition: Callable[[], bool], *, restart: bool = True, within_s: float = 20.0) -> None:
        def came_true() -> bool:
            if condition():
                return True
            self.supervisor.poll(restart=restart)
            self.supervisor.wait(0.05)
            return False

        wait_for(came_true, within_s, lambda: f"said: {self.said}; logs: {self.logs()}", look_every_s=0)

    def logs(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob("*.log")}

    def wrote(self, name: str, text: str) -> bool:
        return text in self.supervisor.log_of(name).read_text()


@pytest.fixture
def policy() -> BackoffPolicy:
    return BackoffPolicy(first_s=0.1, longest_s=1.0, healthy_after_s=60.0)


@pytest.fixture
def cluster(tmp_path: Path, policy: BackoffPolicy) -> Iterator[Cluster]:
    with Wakeup.listen() as wakeup:
        made = Cluster(tmp_path, wakeup, policy)
        yield made
        made.supervisor.stop(dict.fromkeys(range(9), 0.0))
        assert made.supervisor.pids == {}
