"""The parts of a world that draw lots in the simulation: here each does what a rule has ordered, and nothing else."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.protocol.commands import Bell, Command, Heartbeat, Register, Scan
from app.protocol.messages import Message
from tests.model.parcels import Parcel, bell_name
from tests.sim.fates import FINE, ON_TIME, CallFate, Delays
from tests.sim.faults import Faults
from tests.sim.pace import Pace, Slowness
from tests.sim.supervisor import Supervisor

if TYPE_CHECKING:
    from tests.sim.kv_memory import KVMemory
    from tests.sim.node import KVNode
    from tests.sim.process import Process
    from tests.sim.world import World

_TICK = "tick of beat"
LOST_CALL, LATE_CALL, LOST_REPLY, LATE_REPLY = "call lost", "call late", "reply lost", "reply late"
"""What befalls a ledger call."""
KEEP_ALIVE = frozenset({Heartbeat.name, Register.name, Scan.name})
"""Calls by which the ledger learns who lives and that others are dead."""
_FLIPPED_BIT = 1 << 7


class SteadyPace(Pace):
    """Everything takes the time it takes; who is served among equals goes round."""

    def __init__(self, slowness: Slowness) -> None:
        super().__init__(0, slowness)
        self._turn = 0
        self.choose = self._next

    def _next(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """As ``randrange``, which is asked for one of ``start`` only."""
        self._turn += 1
        return self._turn % start

    def network(self) -> float:
        return self._network_s

    def thread(self) -> float:
        return 0.0001

    def step(self, num_tokens: int) -> float:
        return self._steps * (0.004 + 0.0004 * num_tokens)

    def block(self) -> float:
        return self._block_s


class ChosenFaults(Faults):
    """Orders wait here for the next thing of their kind, each until it has struck once."""

    def __init__(self, world: World) -> None:
        super().__init__(world, 0, {})
        self.lucky = True
        """Whether what is on a cut link is kept, and whether peers notice that a process has died."""
        self.excused_until = 0.0
        """Up to here it is no wonder that nobody takes over what the dead held: no scan or heartbeat came through."""
        self._carried_so: defaultdict[str, deque[Delays]] = defaultdict(deque)
        self._calls_so: defaultdict[str, deque[CallFate]] = defaultdict(deque)
        self._breaks: set[str] = set()
        self._corrupts_in: deque[int] = deque()

    # orders

    def carry(self, name: str, delays: Delays) -> None:
        """The next parcel of this name comes so late, once for each of ``delays``."""
        self._carried_so[name].append(delays)

    def tick(self, delays: Delays) -> None:
        """So does the next tick of beat."""
        self._carried_so[_TICK].append(delays)

    def call(self, command: str, fate: CallFate) -> None:
        """The next ledger call with this command meets this fate."""
        self._calls_so[command].append(fate)

    def break_sequence(self, node: str) -> None:
        """The engine of this node cannot compute the next sequence that it samples for."""
        self._breaks.add(node)

    def corrupt(self, number: int) -> None:
        """The block that is copied after ``number`` others does not arrive as what was sealed."""
        self._corrupts_in.append(number)

    def excuse(self, until: float) -> None:
        self.excused_until = max(self.excused_until, until)

    def clear(self) -> None:
        """Forget all orders."""
        self._carried_so.clear()
        self._calls_so.clear()
        self._breaks.clear()
        self._corrupts_in.clear()
        self.lucky = True
        self.active = False

    # what the world asks

    def coin(self) -> bool:
        return self.lucky

    def ledger_call(self, who: str, commands: Sequence[Command]) -> CallFate:
        for command in commands:
            if self._calls_so[command.name]:
                fate = self._calls_so[command.name].popleft()
                self.struck(_said(fate), command.name, getattr(command, "uid", ""), *commands)
                self.call_disturbed(commands, fate.arrives_s or 0.0)
                return fate
        return FINE

    def call_disturbed(self, commands: Sequence[Command], late_s: float) -> None:
        """A sign of life or a scan is lost or late: what rests on it is late by as much."""
        if any(command.name in KEEP_ALIVE for command in commands):
            self.excuse(self._world.timeline.now + late_s + self._world.times.ledger_timeout_s)

    def message(self, message: Message) -> Delays:
        return self._carry_so(message.kind, message.uid)

    def reply(self) -> Delays:
        return self._carry_so(Parcel.REPLY, "")

    def bell(self, bell: Bell) -> Delays:
        return self._carry_so(bell_name(bell), bell.uid)

    def event(self, uid: str) -> Delays:
        return self._carry_so(Parcel.EVENT, uid)

    def beat(self) -> Delays:
        return self._carry_so(_TICK, "")

    def popped(self, node: KVNode) -> None:
        """A bell that is popped by the dying: a crash is a rule of its own."""

    def copied(self, incarnation: str, memory: KVMemory, block: int) -> None:
        if not self._corrupts_in:
            return
        self._corrupts_in[0] -= 1
        if self._corrupts_in[0] < 0:
            self._corrupts_in.popleft()
            memory.blocks[block][0] ^= _FLIPPED_BIT
            self.struck("corrupted", "KV", "", incarnation, block)

    def breaks_sequence(self, node: str, uid: str) -> bool:
        if node not in self._breaks:
            return False
        self._breaks.discard(node)
        self.struck("broken", "sequence", uid, node)
        return True

    def kills_its_node(self, uid: str) -> bool:
        return False

    def _carry_so(self, name: str, uid: str) -> Delays:
        if not self._carried_so[name]:
            return ON_TIME
        delays = self._carried_so[name].popleft()
        self.struck(("lost", "late", "doubled")[len(delays)], name, uid, *delays)
        return delays

    def struck(self, how: str, what: str, uid: str, *details: object) -> None:
        """Write down and count what was ordered, now that it happens."""
        self._world.count(f"{how}: {what}")
        self._world.note("", "fault", uid, f"{how}:", what, *details)


def _said(fate: CallFate) -> str:
    if fate.arrives_s is None:
        return LOST_CALL
    return LATE_CALL if fate.answered is None else LOST_REPLY


class ChosenSupervisor(Supervisor):
    """Reports an end unless a rule has forbidden it. Starts nothing again by itself before the faults are over."""

    def __init__(self, world: World) -> None:
        super().__init__(world, 0, 1.0)
        self.restarts = False
        self.silent_about: set[str] = set()
        """Names of processes whose next end is not reported."""

    def ended(self, process: Process) -> None:
        if process.name in self.silent_about:
            self.silent_about.discard(process.name)
        else:
            self.report(process)
        if self.restarts:
            self.after(self.world.times.restart_most_s, self._start, process.name)

    def report(self, process: Process) -> None:
        """Tell the ledger that this life is over."""
        self.after(0.005, self._report, process.incarnation, self.world.timeline.now + 5.0)
