"""One world in which nothing happens by chance: who is there, what clients do, and what happens next."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.model.chosen import ChosenFaults, ChosenSupervisor, SteadyPace
from tests.model.parcels import Entry, bring, of_process, pending, take
from tests.model.promises import Past
from tests.model.wishes import LONG_S, Mood, Order, Setting
from tests.sim.blame import BLAMELESS, HARMLESS
from tests.sim.disasters import Disaster
from tests.sim.faults import Fault
from tests.sim.ledger_client import LedgerClient
from tests.sim.node import KVNode
from tests.sim.process import State
from tests.sim.web import Web
from tests.sim.wires import Link
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.client import Stream, Wish
    from tests.sim.timeline import Happening

_COMES_UP_S = 0.3
"""How long a rule waits for the next thing of its kind: longer than a handoff takes, shorter than every deadline."""
_ALLOWED = {Mood.BLAMELESS: BLAMELESS, Mood.HARMLESS: HARMLESS}


class Cluster:
    """A world and who may be chosen in it. Names stay over restarts: "w0", "p1", "d0", "c0", "beat"."""

    def __init__(self, setting: Setting, prefill_nodes: int, decode_nodes: int) -> None:
        self.world = World(setting.scenario(prefill_nodes, decode_nodes))
        self.world.pace = SteadyPace(self.world.scenario.slowness)
        self.faults = self.world.faults = ChosenFaults(self.world)
        self.supervisor = self.world.supervisor = ChosenSupervisor(self.world)
        self.wishes: list[Wish] = []
        self._mood = setting.mood
        self.past = Past()
        self.world.run(0.02)

    # who there is

    @property
    def now(self) -> float:
        return self.world.timeline.now

    def names(self, state: State, *roles: str) -> list[str]:
        """Processes in this state; ``roles``: of these letters only."""
        everybody = [process for process in self.world._current.values() if process.state is state]
        return [process.name for process in everybody if not roles or process.name[0] in roles]

    def web(self, which: int) -> str:
        return f"w{which % self.world.scenario.webs}"

    def in_process(self) -> list[str]:
        """uids of the requests that have not ended, the oldest first."""
        return [uid for uid, record in self.world.ledger.store.records.items() if record.in_process]

    def strikes(self, kind: Fault | Disaster) -> bool:
        """Whether a fault of this kind may strike; from now on it may be why an attempt is lost, or a failure."""
        if kind not in _ALLOWED.get(self._mood, (kind,)):
            return False
        scenario = self.world.scenario
        struck: dict[Any, float] = {**scenario.rates, kind: 1.0}
        if Disaster.NODE_DRAINS in struck and any(each.startswith("ledger ") for each in struck):
            struck[Disaster.NODE_CRASHES] = 1.0  # a node that leaves and is not heard is a lost one to the ledger
        self.world.scenario = replace(scenario, rates=struck)
        return True

    # clients

    def send(self, wish: Wish) -> Stream:
        self.wishes.append(wish)
        return self.world.clients.add(wish)

    def submit(self, order: Order, web: int, client_id: str = "") -> Stream:
        """A new request, under a new id unless ``client_id`` says which."""
        if order.first_token_timeout_s < LONG_S:  # so short that load alone may use it up
            if self._mood is Mood.ANY:
                times = replace(self.world.scenario.times, first_token_timeout_s=float(order.first_token_timeout_s))
                self.world.scenario = replace(self.world.scenario, times=times)
            else:
                order = replace(order, first_token_timeout_s=LONG_S)
        number = len(self.wishes) + 1
        return self.send(order.wish(number, client_id or f"r{number}", self.web(web)))

    def open_streams(self) -> list[Stream]:
        return [stream for stream in self.world.clients.streams if not stream.outcome]

    def cancel(self, client_id: str, web: int) -> bool:
        """Somebody posts the cancellation of what has this id."""
        process = self.world.current(self.web(web))
        if not isinstance(process, Web) or not process.alive:
            return False
        process.after(self.world.pace.network(), process.cancel, client_id)
        return True

    # time

    def run_for(self, seconds: float) -> None:
        self.world.run(self.now + seconds)

    def next_happenings(self, count: int) -> None:
        for _ in range(count):
            what = self.world.timeline.pop(self.now + 1.0)
            if what is not None:
                self.world.happen(what)

    def next_deadline(self, which: int) -> bool:
        """Let time pass to a moment at which somebody stops waiting for somebody."""
        moments = sorted({when for when, _, what in self.world.timeline.pending() if _is_deadline(what)})
        moments = [when for when in moments if when > self.now][: which + 1]
        if not moments:
            return False
        self.world.run(moments[-1])
        return True

    def expire(self) -> bool:
        """Let the next deadline of the ledger pass, if one is near: of the first token, in the queue, of a grace."""
        store = self.world.ledger.store
        due = min((*store.deadlines.values(), *store.unwatched.values()), default=0)
        if not 0 < due - store.time < 5000:
            return False
        self.run_for((due - store.time) / 1000 + 0.6)
        return True

    # out of its turn

    def come_up(self, name: str) -> None:
        """Go on until something of this name is on its way."""
        self.let(name, 0, stop_before=True)

    def let(self, name: str, which: int, *, stop_before: bool) -> bool:
        """Let a chosen thing of this name happen now; if none is on its way, go on up to the next one.

        Where nobody is waiting for an answer, two clients ask for one: else there would be none.
        """
        if not (self.in_process() or self.open_streams()):
            self.submit(Order(), 0)
            self.submit(Order(prompt_tokens=9), 1)
        there = pending(self.world, name)
        if there:
            if not stop_before:
                self.world.happen(self.take(there, which))
            return True
        what = bring(self.world, name, _COMES_UP_S)
        if what is None:
            return False
        if stop_before:
            self.world.timeline.at(self.now, what)
        else:
            self.world.happen(what)
        return True

    def let_process(self, name: str, count: int) -> bool:
        """Let a chosen process do its next things before everybody else's."""
        did = False
        for _ in range(count):
            there = of_process(self.world, name)
            if there:
                self.world.happen(take(self.world, there[0]))
                did = True
        return did

    def take(self, there: list[Entry], which: int) -> Happening:
        return take(self.world, there[which % len(there)])

    def say(self, name: str, what: str) -> None:
        """Write a line of the trace."""
        self.world.note(name, what, "")


def _is_deadline(what: partial[None]) -> bool:
    """Whether somebody really waits for it: most timers find that what they were for has come."""
    part = what.func.__self__  # type: ignore[attr-defined]
    function = what.func.__func__  # type: ignore[attr-defined]
    if function in (Link._ended, LedgerClient._broken):
        return what.args[0] in part._open
    return function is KVNode._wake and bool(part._alarm == what.args[0])
