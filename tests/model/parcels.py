"""What is on its way at a moment, by name: so that a rule can choose one thing and do something to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from app.protocol.commands import Activate, Admit, Bell, Claim, Emit, ReserveNext
from tests.sim.broker import Broker
from tests.sim.connection import Connection
from tests.sim.engine import Engine
from tests.sim.ledger_client import LedgerClient
from tests.sim.ledger_server import LedgerServer
from tests.sim.mover import Mover
from tests.sim.node import KVNode, LedgerLane
from tests.sim.web import Web
from tests.sim.wires import Link

if TYPE_CHECKING:
    from tests.sim.timeline import Happening
    from tests.sim.world import World

Names = tuple[str, ...]
Entry = tuple[float, int, "Happening"]
"""When it is due, its number on the timeline, and what it is."""


class Parcel(StrEnum):
    """What is carried between processes and may be lost, doubled, late, or overtaken by another."""

    GRANT = "grant"
    COMMIT = "commit"
    ACTIVATING = "activating"
    PULL_RESULT = "pull_result"
    REPLY = "reply"
    PREFILL_BELL = "prefill bell"
    DECODE_BELL = "decode bell"
    OWN_BELL = "bell on its own queue"
    EVENT = "event"


BELLS = frozenset({Parcel.PREFILL_BELL, Parcel.DECODE_BELL, Parcel.OWN_BELL})


class Task(StrEnum):
    """What a process does by itself, and when is its own affair."""

    STEP = "engine step"
    SEAL = "seal"
    PULL = "pull"
    LOOK = "look at the inbox"
    ASK = "next ledger call"


def call(command: str) -> str:
    """Name of a ledger call on its way to the server, from that of a command in it."""
    return f"call {command}"


def answer(command: str) -> str:
    """Name of the answers on their way back."""
    return f"answer {command}"


MOMENTS: Mapping[str, str] = {
    "admit": call(Admit.name),
    "claim": call(Claim.name),
    "reserve": call(ReserveNext.name),
    "grant": Parcel.GRANT,
    "compute": Task.STEP,
    "seal": Task.SEAL,
    "commit": Parcel.COMMIT,
    "pull": Task.PULL,
    "activate": call(Activate.name),
    "emit": call(Emit.name),
    "pull result": Parcel.PULL_RESULT,
    "reply": Parcel.REPLY,
    "look": Task.LOOK,
}
"""What happens to a request on its way, in this order: moments at which a fault may strike."""


def bell_name(bell: Bell) -> Parcel:
    if not bell.uid:
        return Parcel.OWN_BELL
    return Parcel.PREFILL_BELL if bell.queue == "prefill" else Parcel.DECODE_BELL


def names_of(what: Happening) -> Names:
    """Under which names a rule may choose it; none for timers and the like, which keep their time."""
    name = _NAMERS.get(what.func.__func__)  # type: ignore[attr-defined]
    return name(what.func.__self__, *what.args) if name is not None else ()  # type: ignore[attr-defined]


def pending(world: World, name: str) -> list[Entry]:
    """Everything of this name that is on its way, the next one first."""
    return [entry for entry in world.timeline.pending() if name in names_of(entry[2])]


def of_process(world: World, name: str) -> list[Entry]:
    """Everything that is still to happen in the process of this name and may happen at any time."""
    return [entry for entry in world.timeline.pending() if names_of(entry[2]) and _process(entry[2]) == name]


def take(world: World, entry: Entry) -> Happening:
    """Take it off the timeline, without any time passing."""
    timeline = world.timeline
    moment = timeline.now
    what = timeline.take(entry[1])
    timeline.now = moment
    return what


def bring(world: World, name: str, within_s: float) -> Happening | None:
    """Let things happen until the next one would be of this name; take that one off the timeline."""
    timeline = world.timeline
    end = timeline.now + within_s
    while (what := timeline.pop(end)) is not None:
        if name in names_of(what):
            return what
        world.happen(what)
    return None


def _process(what: Happening) -> str:
    return what.func.__self__.process.name  # type: ignore[attr-defined,no-any-return]


def _commands(client: LedgerClient, number: int) -> Names:
    """Of an open call; of one that timed out nobody waits for the answers any more."""
    entry = client._open.get(number)
    return tuple(answer(command.name) for command in entry[0]) if entry is not None else ()


_NAMERS: Mapping[Callable[..., Any], Callable[..., Names]] = {
    Link.arrives: lambda link, sender, number, to, deadline, message: (message.kind,),
    Link.replied: lambda link, number, reply: (Parcel.REPLY,),
    Broker.put: lambda broker, queue, bell: (bell_name(bell),),
    KVNode.hears: lambda node, bell: (bell_name(bell),),
    Web._read_events: lambda web: (Parcel.EVENT,),
    Connection.hears: lambda connection, event: (Parcel.EVENT,),
    LedgerServer.arrives: lambda server, client, number, commands, *rest: tuple(
        call(command.name) for command in commands
    ),
    LedgerClient.answered: lambda client, number, answers, time_ms: _commands(client, number),
    Engine._step_ends: lambda engine, chunks: (Task.STEP,),
    Engine._between_steps: lambda engine: (Task.STEP,),
    Mover._seal: lambda mover, job: (Task.SEAL,),
    Mover._open: lambda mover, job: (Task.PULL,),
    Mover._copy: lambda mover, job, source, number: (Task.PULL,),
    KVNode._look: lambda node: (Task.LOOK,),
    LedgerLane._ask: lambda lane: (Task.ASK,),
}
