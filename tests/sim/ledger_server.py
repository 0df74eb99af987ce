"""The ledger's server around the memory twin: its clock, its lives, what an fsync kept, and whom its events wake."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

from app.errors import LedgerUnavailable
from app.ledger.memory import MemoryLedger
from app.ledger.memory.state import Store
from app.protocol.commands import Answer, Cluster, Command, Event, Holdings, Snapshot
from tests.sim.fates import CallFate
from tests.sim.process import Process, State

if TYPE_CHECKING:
    from tests.sim.ledger_client import LedgerClient
    from tests.sim.world import World

READS = (Snapshot, Holdings, Cluster)
"""Commands that change nothing."""
_WALL_AT_START_MS = 1_700_000_000_000


class Twin(MemoryLedger):
    """The memory twin as a value that can be copied: all of it but its lock."""

    def begin_life(self, life: int) -> None:
        """The server has started again."""
        self._life = life

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_changed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._changed = threading.Condition()


class LedgerServer(Process):
    """One server. ``restart`` is its next life; a frozen one reads what came meanwhile when it thaws."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "ledger")
        self.up = True
        self.read_only = False
        """It refuses every write, as a full disk or a failover makes it."""
        self.life = 1
        self.healthy_since = 0.0
        """Since when it has answered without a break, with a clock that runs."""
        self._clock_offset_ms = 0
        self._clock_stands_at: int | None = None
        self._image: bytes | None = None
        self._twin = Twin(self.wall_ms)

    @property
    def store(self) -> Store:
        """The data, for the checks."""
        return self._twin.store

    def wall_ms(self) -> int:
        """The server's own clock."""
        if self._clock_stands_at is not None:
            return self._clock_stands_at
        return _WALL_AT_START_MS + self._clock_offset_ms + int(1000 * self.world.timeline.now)

    def time_ms(self) -> int:
        """Ledger time."""
        return self._twin.time_ms()

    @property
    def works(self) -> bool:
        """It takes writes, and its clock runs."""
        return self.up and not self.read_only and self.state is State.RUNNING and self.clock_runs

    @property
    def clock_runs(self) -> bool:
        return self._clock_stands_at is None

    def events_after(self, web: str, position: int) -> list[tuple[int, Event]]:
        """What stands on a web's stream behind ``position``, oldest first."""
        found = []
        for number, event in reversed(self.store.events.get(web, ())):
            if number <= position:
                break
            found.append((number, event))
        return found[::-1]

    def arrives(
        self,
        client: LedgerClient,
        number: int,
        commands: tuple[Command, ...],
        not_after_ms: int,
        life: int,
        fate: CallFate,
    ) -> None:
        """A call comes in on a connection to this life, or to an earlier one: then nobody reads it."""
        if life != self.life or not self.up:
            return
        world = self.world
        answers = [self.answer(client.process.name, command, not_after_ms) for command in commands]
        if fate.answered is None:
            client.after(world.pace.network(), client.answered, number, answers, self._twin.store.time)
        elif fate.answered:
            client.after(world.pace.network(), client.answered, number, answers[: fate.answered], self._twin.store.time)

    def answer(self, who: str, command: Command, not_after_ms: int) -> Answer | LedgerUnavailable:
        """What the server says to one command."""
        if self.read_only and not isinstance(command, READS):
            return LedgerUnavailable("READONLY")
        return self.apply(who, command, not_after_ms)

    def apply(self, who: str, command: Command, not_after_ms: int) -> Answer:
        """Apply one command, check what it did, and wake whoever its events are for."""
        world = self.world
        before = self._twin.store.event_number
        try:
            answer = self._twin.apply(command, not_after_ms)
        except Exception as error:
            raise world.violation(f"the ledger cannot apply {command}: {error!r}") from error
        world.note(who, "ledger", getattr(command, "uid", ""), command, answer)
        world.checker.applied(command, answer, not_after_ms)
        if self._twin.store.event_number != before:
            for web in self._twin.store.events:
                for _, event in self.events_after(web, before):
                    world.checker.told(web, event)
            world.wake_webs()
        return answer

    # faults

    def step_clock(self, by_ms: int) -> None:
        """Somebody sets the server's clock."""
        self._clock_offset_ms += by_ms
        self.healthy_since = self.world.timeline.now

    def refuse_writes(self) -> None:
        """From now on it is read-only."""
        self.read_only = True

    def take_writes(self) -> None:
        """No longer."""
        self.read_only = False
        self.healthy_since = self.world.timeline.now

    def stop_clock(self) -> None:
        """The server's clock stands still."""
        self._clock_stands_at = self.wall_ms()

    def start_clock(self) -> None:
        """It runs again, and jumps to where it would be."""
        self._clock_stands_at = None
        self.healthy_since = self.world.timeline.now

    def fsync(self) -> None:
        """Keep a copy, as the append-only file would hold it."""
        self._image = pickle.dumps((self.store, self.world.checker.save()))

    def crash(self) -> None:
        """The process ends; what was written since the last fsync is lost, and so is every connection."""
        self.up = False
        self.life += 1
        self._backlog = []

    def restart(self) -> None:
        """A new life, from what the last fsync kept."""
        if self._image is not None:
            self._twin.store, checked = pickle.loads(self._image)
            self.world.checker.restore(checked)
            self._image = None
        self._twin.begin_life(self.life)
        self.up = True
        self.healthy_since = self.world.timeline.now

    def thaw(self) -> None:
        super().thaw()
        self.healthy_since = self.world.timeline.now
