"""What runs, and may be frozen or die: the unit of faults. Its parts do nothing while it does not run."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.timeline import Happening
    from tests.sim.world import World


class State(StrEnum):
    RUNNING = "running"
    FROZEN = "frozen"
    """Stopped, as by SIGSTOP: it keeps all it has, and what comes in waits."""
    DEAD = "dead"


class Part:
    """Something whose happenings are those of a process."""

    process: Process

    def after(self, in_s: float, what: Callable[..., object], *args: Any) -> None:
        """Let one of our own methods happen in ``in_s`` seconds."""
        timeline = self.process.world.timeline
        timeline.at(timeline.now + in_s, partial(what, *args))


class Process(Part):
    """``name`` stays over restarts ("p0"); ``incarnation`` is of one life ("p0.2")."""

    def __init__(self, world: World, name: str, life: int = 1) -> None:
        self.process = self
        self.world = world
        self.name = name
        self.incarnation = self._name_life(name, life)
        self.state = State.RUNNING
        self._backlog: list[Happening] = []
        self._drawn = 0

    def _name_life(self, name: str, life: int) -> str:
        return f"{name}.{life}"

    def draw(self) -> str:
        """A new id. Each process counts for itself: what others do meanwhile changes no name."""
        self._drawn += 1
        return f"{self.incarnation}-{self._drawn}"

    def perform(self, what: Happening) -> None:
        """Let ``what`` happen, if this process still runs."""
        if self.state is State.RUNNING:
            what()
        elif self.state is State.FROZEN:
            self._backlog.append(what)

    def freeze(self) -> None:
        if self.state is State.RUNNING:
            self.state = State.FROZEN

    def thaw(self) -> None:
        """Go on. What waited happens now: in its order for each part, in any order between parts, as with threads."""
        if self.state is State.FROZEN:
            self.state = State.RUNNING
            timeline, pace = self.world.timeline, self.world.pace
            free_at: dict[int, float] = {}
            for what in self._backlog:
                part = id(what.func.__self__)  # type: ignore[attr-defined]
                free_at[part] = free_at.get(part, timeline.now) + pace.thread()
                timeline.at(free_at[part], what)
            self._backlog = []

    def die(self) -> None:
        self.state = State.DEAD
        self._backlog = []

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD
