"""What befalls processes and the connections between them, and lasts until its time is over or somebody mends it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.sim.disasters import Disaster
from tests.sim.node import KVNode
from tests.sim.process import Process, State

if TYPE_CHECKING:
    from tests.model.cluster import Cluster
    from tests.sim.world import World

FOR_EVER = float("inf")
"""Until a rule mends it, or the faults are over."""
ROLLBACK = "rollback"
"""What a crash of the ledger is counted as where something was lost."""
_FSYNC_S = 1.0
"""What is older than this an fsync has kept."""
_NODE = (Disaster.NODE_CRASHES, Disaster.NODE_FREEZES)
_BY_ROLE = {
    "w": (Disaster.WEB_CRASHES, Disaster.WEB_FREEZES),
    "c": (Disaster.CONTROL_CRASHES, Disaster.CONTROL_CRASHES),
    "b": (Disaster.BEAT_DIES, Disaster.BEAT_DIES),
}
"""What a crash and a freeze count as, by the first letter of the name; of all others they are those of a node."""


class Mender(Process):
    """Knows what lasts, and ends it when its time has come."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "mender")
        self._lasts: dict[int, partial[None]] = {}

    def __bool__(self) -> bool:
        return bool(self._lasts)

    def later(self, in_s: float, end: partial[None]) -> None:
        """Do ``end`` in so many seconds, or when somebody mends it before that."""
        self._drawn += 1
        self._lasts[self._drawn] = end
        if in_s < FOR_EVER:
            self.after(in_s, self._mend, self._drawn)

    def mend(self, which: int) -> None:
        """End one of what lasts now."""
        self._mend(list(self._lasts)[which % len(self._lasts)])

    def _mend(self, number: int) -> None:
        end = self._lasts.pop(number, None)
        if end is not None:
            end()


class Mishaps:
    """Processes are named as in ``Cluster``. Each answers whether it struck: the mood may forbid it."""

    def __init__(self, cluster: Cluster) -> None:
        self.mender = Mender(cluster.world)
        self._cluster = cluster
        self._world = cluster.world
        self._fsynced_at: float | None = None

    # processes

    def crash(self, name: str, *, reported: bool, noticed: bool, down_s: float) -> bool:
        """A process is killed; its supervisor reports that, or not; its peers see their connections break, or not."""
        if not self._cluster.strikes(_BY_ROLE.get(name[0], _NODE)[0]):
            return False
        if not reported:
            self._cluster.supervisor.silent_about.add(name)
        faults = self._cluster.faults
        lucky, faults.lucky = faults.lucky, noticed
        self._world.end_process(self._world.current(name), "fault: killed")
        faults.lucky = lucky
        self.mender.later(down_s, partial(self.restart, name))
        return True

    def restart(self, name: str) -> None:
        if not self._world.current(name).alive:
            self._world.start(name)

    def freeze(self, name: str, *, for_s: float) -> bool:
        if not self._cluster.strikes(_BY_ROLE.get(name[0], _NODE)[1]):
            return False
        self._world.current(name).freeze()
        self._cluster.say(name, "is frozen")
        self.mender.later(for_s, partial(self.thaw, name))
        return True

    def thaw(self, name: str) -> None:
        self._world.current(name).thaw()
        self._cluster.say(name, "is thawed")

    def drain(self, name: str, *, reported: bool) -> bool:
        node = self._world.current(name)
        if not isinstance(node, KVNode) or node.leaving or not self._cluster.strikes(Disaster.NODE_DRAINS):
            return False
        if not reported:
            self._cluster.supervisor.silent_about.add(name)
        node.drain()
        self._cluster.say(name, "is asked to drain")
        return True

    def get_stuck(self, name: str, *, mover: bool) -> bool:
        """The engine or the mover of a node never comes back from what it does."""
        node = self._world.current(name)
        kind = Disaster.MOVER_STUCK if mover else Disaster.ENGINE_STUCK
        if not isinstance(node, KVNode) or not self._cluster.strikes(kind):
            return False
        (node.mover if mover else node.engine).get_stuck()
        self._cluster.say(name, f"its {'mover' if mover else 'engine'} gets stuck")
        return True

    # connections

    def cut(self, one: str, other: str, *, keeps: bool, for_s: float) -> bool:
        """Cut the link of two nodes; what is sent meanwhile comes when it is healed, or never."""
        if not self._cluster.strikes(Disaster.LINK_CUT):
            return False
        self._cluster.faults.lucky = keeps
        self._world.wires.cut(one, other)
        self._cluster.say(one, f"is cut from {other}")
        self.mender.later(for_s, partial(self._heal, one, other))
        return True

    def _heal(self, one: str, other: str) -> None:
        self._world.wires.heal(one, other)
        self._cluster.say(one, f"is connected with {other}")

    def cut_off_from_ledger(self, name: str, *, keeps: bool, for_s: float) -> bool:
        """No call arrives; those that are sent meanwhile come when it is reconnected, or never."""
        if not self._cluster.strikes(Disaster.NODE_CUT_OFF):
            return False
        self._cluster.faults.lucky = keeps
        self._world.cut_off_from_ledger(name)
        self._cluster.say(name, "is cut off from the ledger")
        self.mender.later(for_s, partial(self._reconnect, name))
        return True

    def _reconnect(self, name: str) -> None:
        self._world.reconnect_to_ledger(name)
        self._cluster.say(name, "is connected with the ledger")

    # servers

    def broker_forgets(self) -> bool:
        """It restarts, and kept no bell."""
        if not self._cluster.strikes(Disaster.BROKER_RESTARTS):
            return False
        self._world.broker.lose_all()
        return True

    @property
    def ledger_answers(self) -> bool:
        return self._world.ledger.up and self._world.ledger.state is State.RUNNING

    def fsync(self) -> None:
        self._world.ledger.fsync()
        self._fsynced_at = self._cluster.now

    def crash_ledger(self, *, down_s: float) -> bool:
        """Its server ends. When it comes back it knows what it knew at the last fsync."""
        if not self._cluster.strikes(Disaster.LEDGER_ROLLS_BACK):
            return False
        if self._fsynced_at is not None and self._cluster.now - self._fsynced_at > _FSYNC_S:
            self.fsync()
        if self._fsynced_at is not None and self._fsynced_at < self._cluster.now:
            self._world.count(ROLLBACK)
        self._fsynced_at = None
        self._world.ledger.crash()
        if self._world.one_server:
            self._world.broker.lose_all()
        self._cluster.say("ledger", "crashes")
        self.mender.later(down_s, partial(self._ledger_returns))
        return True

    def _ledger_returns(self) -> None:
        self._world.ledger.restart()
        self._cluster.say("ledger", "is back")

    def freeze_ledger(self, *, for_s: float) -> bool:
        """Nobody reads what comes in; the same of bells where the broker is the same server."""
        if not self._cluster.strikes(Disaster.LEDGER_FREEZES):
            return False
        self._world.ledger.freeze()
        if self._world.one_server:
            self._world.broker.freeze()
        self._cluster.say("ledger", "is frozen")
        self.mender.later(for_s, partial(self._thaw_ledger))
        return True

    def _thaw_ledger(self) -> None:
        self._world.ledger.thaw()
        self._world.broker.thaw()
        self._cluster.say("ledger", "is thawed")

    def step_clock(self, by_ms: int) -> bool:
        if not self._cluster.strikes(Disaster.CLOCK_STEPS):
            return False
        self._world.ledger.step_clock(by_ms)
        self._cluster.say("ledger", f"its clock steps by {by_ms} ms")
        return True

    def stop_clock(self, *, for_s: float) -> bool:
        if not self._cluster.strikes(Disaster.CLOCK_STOPS):
            return False
        self._world.ledger.stop_clock()
        self._cluster.say("ledger", "its clock stands still")
        self.mender.later(for_s, partial(self._start_clock))
        return True

    def _start_clock(self) -> None:
        self._world.ledger.start_clock()
        self._cluster.say("ledger", "its clock runs again")
