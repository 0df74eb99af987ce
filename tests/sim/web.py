"""A web process: its connections, its event stream, its heartbeats and farewells, as ``web.node`` has them."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from app.errors import LedgerError
from app.protocol.commands import Abort, AbortStatus, Detach, ReadStatus, Snapshot
from app.schemas import NodeInfo
from tests.sim.connection import Connection
from tests.sim.heartbeat import Beats
from tests.sim.ledger_client import LedgerClient, Results
from tests.sim.process import Process, State

if TYPE_CHECKING:
    from tests.sim.client import Stream
    from tests.sim.world import World

_READ_AGAIN_S = 0.2
"""Pause of the event reader when the ledger does not answer."""


class Web(Process):
    """One life of a web process."""

    def __init__(self, world: World, name: str, life: int) -> None:
        super().__init__(world, name, life)
        self.client = LedgerClient(self)
        info = NodeInfo(incarnation=self.incarnation, role="web", name=name, pid=1, host="host", model="model")
        self.beats = Beats(self, self, info, self.client)
        self.connections: dict[str, Connection] = {}
        """By the id of the connection."""
        self._farewells: deque[tuple[Abort | Detach, int]] = deque()
        self._saying = 0
        self._position = 0
        self._reading = False

    # what clients do

    def open(self, stream: Stream) -> Connection:
        """A client asks for an answer."""
        connection = Connection(self, stream)
        self.connections[connection.watcher.connection] = connection
        connection.admit()
        return connection

    def cancel(self, client_id: str) -> None:
        """``POST /v1/requests/{id}/cancel``; what became of it the client sees on its stream."""
        self.client.call((Snapshot(client_id=client_id),), self._cancel_found)

    def _cancel_found(self, results: Results) -> None:
        found = results[0]
        if not isinstance(found, LedgerError) and found.status is ReadStatus.FOUND:
            self.client.call((Abort(found.uid, "cancelled"),), self._cancelled)

    def _cancelled(self, results: Results) -> None:
        """Without an answer the client is told so, and may ask again."""

    # farewells

    def say_farewell(self, command: Abort | Detach, until_ms: int = -1) -> None:
        """Tell the ledger that nobody waits any more; again with each heartbeat until it answers.

        ``until_ms``: until this ledger time an attachment of unknown outcome may still undo it.
        """
        self._saying += 1
        self.client.call((command,), partial(self._said, command, until_ms))

    def _said(self, command: Abort | Detach, until_ms: int, results: Results) -> None:
        self._saying -= 1
        answer = results[0]
        if isinstance(answer, LedgerError) or answer.status is AbortStatus.LATE or answer.time_ms <= until_ms:
            self._farewells.append((command, until_ms))

    @property
    def at_rest(self) -> bool:
        """Registered, with no connection open and nothing left to say."""
        return self.beats.registered and not self.connections and not self._farewells and not self._saying

    # events

    def wake_reader(self) -> None:
        """The ledger has something on our stream."""
        if not self._reading:
            self._reading = True
            self.after(self.world.pace.network(), self._read_events)

    def _read_events(self) -> None:
        self._reading = False
        server = self.world.ledger
        if server.state is not State.RUNNING or not server.up or self.world.cut_off(self.name):
            self._reading = True
            self.after(_READ_AGAIN_S, self._read_events)
            return
        for number, event in server.events_after(self.incarnation, self._position):
            self._position = number
            for connection in [one for one in self.connections.values() if event.uid in one.uids]:
                for delay in self.world.faults.event(event.uid):
                    if delay:
                        self.after(delay, connection.hears, event)
                    else:
                        connection.hears(event)

    def _ledger_changed(self) -> None:
        """Watchers, events or tokens may be gone: every open answer compares itself with its record."""
        self._position = 0
        self.wake_reader()
        for connection in list(self.connections.values()):
            connection.hears(None)

    # what the heartbeats tell

    def on_beat(self) -> None:
        """Nothing here can be stuck."""

    def on_registered(self) -> None:
        self._ledger_changed()

    def on_registration_lost(self) -> None:
        self.beats.register()

    def on_refused(self) -> None:
        """It goes on trying."""

    def on_draining(self) -> None:
        """It has no work of its own to give back."""

    def on_ledger_restarted(self) -> None:
        self._ledger_changed()

    def after_beat(self) -> None:
        """Repeat the farewells that were not heard, once each."""
        farewells, self._farewells = self._farewells, deque()
        for command, until_ms in farewells:
            self.say_farewell(command, until_ms)

    def die(self) -> None:
        super().die()
        self.connections = {}
        self.world.clients.web_died(self.incarnation)
