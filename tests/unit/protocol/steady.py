"""What leaves nothing to chance in a world of the simulation: steady times, and no fault but those of the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.protocol.commands import Bell, Command, Heartbeat, Register, Scan
from app.protocol.messages import Message
from tests.sim.fates import FINE, ON_TIME, CallFate, Delays
from tests.sim.faults import Faults
from tests.sim.invariants import Checker
from tests.sim.pace import Pace, Slowness
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.unit.protocol.cluster import Cluster

TICK = 0.001
STEP = 0.01
_SIGNS_OF_LIFE = (Heartbeat, Register, Scan)


class SteadyPace(Pace):
    """Everything takes the same time always; who is served among equals goes round."""

    def __init__(self) -> None:
        super().__init__(0, Slowness())
        self._turn = 0
        self.choose = self._next

    def _next(self, count: int) -> int:
        self._turn += 1
        return self._turn % count

    def network(self) -> float:
        return TICK

    def thread(self) -> float:
        return 0.0

    def step(self, num_tokens: int) -> float:
        return STEP

    def block(self) -> float:
        return TICK / 4


class Hooks(Faults):
    """Nothing goes wrong but what the test says."""

    def __init__(self, cluster: Cluster, world: World) -> None:
        super().__init__(world, 0, {})
        self._cluster = cluster

    def coin(self) -> bool:
        return False

    def ledger_call(self, who: str, commands: Any) -> CallFate:
        asked = (command for command in commands if not isinstance(command, _SIGNS_OF_LIFE))
        fault = next(filter(None, map(self._cluster.ledger_fault, asked)), "")
        if not fault:
            return FINE
        return CallFate(None if fault == "lost" else 0.0, 0, 3 * TICK)

    def message(self, message: Message) -> Delays:
        return () if self._cluster.lose_message(message) else ON_TIME

    def bell(self, bell: Bell) -> Delays:
        return () if bell.uid and self._cluster.lose_bell(bell) else ON_TIME


class Unchecked(Checker):
    """These tests say themselves what must hold, and some of them write into the ledger."""

    def applied(self, command: Command, answer: Any, not_after_ms: int) -> None:
        """Nothing is concluded from it."""

    def told(self, web: str, event: Any) -> None:
        """Nothing is concluded from it."""
