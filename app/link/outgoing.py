"""The calls that a node makes: one connection per peer, and an end for every call by its deadline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from pydantic import ValidationError

from app.link.wire import Answer, CallOutcome, tune

_IDLE_S = 60.0
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""What a connection's monitor says when it is gone. It never comes back: RECONNECT_IVL is -1."""


@dataclass(slots=True)
class Call:
    """One call on its way. ``done`` runs once."""

    number: int
    address: str
    incarnation: str
    frame: bytes
    deadline: float
    done: Callable[[CallOutcome], None]
    sent: bool = False


@dataclass(slots=True)
class _Peer:
    """One outgoing connection, to one incarnation at one address."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    used: float
    waiting: deque[Call] = field(default_factory=deque)
    open: dict[int, Call] = field(default_factory=dict)


class Outgoing:
    """Every connection to a peer, and the calls on it. One thread owns it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._retired: list[_Peer] = []
        """Connections that missed a deadline: nothing more is sent on them, but open calls may still be answered."""

    def register(self, poller: zmq.Poller) -> None:
        """Add every socket, for what is awaited from it."""
        for peer in self._all_peers():
            poller.register(peer.socket, zmq.POLLIN | (zmq.POLLOUT if peer.waiting else 0))
            poller.register(peer.monitor, zmq.POLLIN)

    @property
    def next_deadline(self) -> float | None:
        """Monotonic time at which a call ends, if it is not answered before."""
        deadlines = [call.deadline for peer in self._all_peers() for call in (*peer.waiting, *peer.open.values())]
        return min(deadlines, default=None)

    def start(self, call: Call) -> None:
        """Send a call as soon as its peer is connected."""
        key = (call.address, call.incarnation)
        peer = self._peers.get(key)
        if peer is None:
            try:
                peer = self._peers[key] = self._connect(call.address)
            except zmq.ZMQError as error:
                call.done(CallOutcome(None, not_sent=True, detail=f"{call.address}: {error}"))
                return
        peer.waiting.append(call)
        peer.used = time.monotonic()
        self._send_waiting(peer)

    def serve(self, ready: dict[object, int]) -> None:
        """Read answers, end what is lost or overdue, and send what waits. ``ready``: what the poller found."""
        for key, peer in self._by_key():
            if peer.socket in ready:
                self._serve_peer(peer)
            if peer.monitor in ready:
                self._drop_peer(key, peer, "connection lost")
            else:
                self._expire(key, peer)

    def close(self) -> None:
        """Close every connection and end every call."""
        for key, peer in self._by_key():
            self._drop_peer(key, peer, "this node is closing")

    def _connect(self, address: str) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        tune(socket)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = socket.get_monitor_socket(_LOST)
        peer = _Peer(socket, monitor, time.monotonic())
        try:
            socket.connect(address)
        except zmq.ZMQError:
            self._close_peer(peer)
            raise
        return peer

    @staticmethod
    def _close_peer(peer: _Peer) -> None:
        peer.socket.disable_monitor()
        peer.monitor.close(linger=0)
        peer.socket.close(linger=0)

    def _serve_peer(self, peer: _Peer) -> None:
        self._send_waiting(peer)
        while True:
            try:
                frame = peer.socket.recv_multipart(zmq.NOBLOCK)[-1]
            except zmq.Again:
                return
            try:
                answer = Answer.model_validate_json(frame)
            except ValidationError:
                continue  # not an answer: the call it might have been for runs into its deadline
            call = peer.open.pop(answer.number, None)
            if call is not None:
                call.done(CallOutcome(answer.reply))

    def _send_waiting(self, peer: _Peer) -> None:
        while peer.waiting:
            try:
                peer.socket.send_multipart([b"", peer.waiting[0].frame], zmq.NOBLOCK)
            except zmq.Again:
                return  # not connected yet, or full: POLLOUT or the deadline comes next
            call = peer.waiting.popleft()
            call.sent = True
            peer.open[call.number] = call

    def _all_peers(self) -> list[_Peer]:
        return [*self._peers.values(), *self._retired]

    def _by_key(self) -> list[tuple[tuple[str, str] | None, _Peer]]:
        return [*self._peers.items(), *((None, retired) for retired in self._retired)]

    def _expire(self, key: tuple[str, str] | None, peer: _Peer) -> None:
        """End overdue calls. A connection that missed a deadline gets no more of them: new calls take a new one, and
        what is delivered late on the old one is refused by the deadline that it carries."""
        now = time.monotonic()
        overdue = [number for number, call in peer.open.items() if call.deadline <= now]
        stuck = any(call.deadline <= now for call in peer.waiting)
        if key is not None and (overdue or stuck):
            del self._peers[key]
            self._retired.append(peer)
            key = None
        for number in overdue:
            self._end_unacknowledged(peer.open.pop(number), "no acknowledgement in time")
        if key is None:
            while peer.waiting:
                call = peer.waiting.popleft()
                if call.deadline <= now:
                    call.done(CallOutcome(None, not_sent=True, detail=f"{call.address}: not reachable"))
                else:
                    self.start(call)
        idle = key is None or peer.used < now - _IDLE_S
        if idle and not peer.open and not peer.waiting:
            self._drop_peer(key, peer, "idle")

    def _drop_peer(self, key: tuple[str, str] | None, peer: _Peer, why: str) -> None:
        """Close a connection. Calls that were sent end here as unacknowledged, the others as not sent."""
        if key is None:
            self._retired.remove(peer)
        else:
            del self._peers[key]
        self._close_peer(peer)
        for call in peer.open.values():
            self._end_unacknowledged(call, why)
        for call in peer.waiting:
            call.done(CallOutcome(None, not_sent=True, detail=f"{call.address}: not reachable"))

    @staticmethod
    def _end_unacknowledged(call: Call, why: str) -> None:
        call.done(CallOutcome(None, not_sent=False, detail=f"{call.address}: {why}"))
