"""ZMQ between nodes: acknowledged calls with a deadline, addressed to an incarnation.

A call ends in exactly one of four ways, and never later than its deadline: accepted, refused with a reason,
*not sent* (certainly), or *unacknowledged* (the peer may or may not have acted: ask the ledger). Nothing is cached
for a peer that is away: a socket queues only while it is connected (IMMEDIATE), a message waits for that connection
no longer than its deadline, and after any failure the socket is closed and its successor starts empty. What a frozen
peer reads late carries its deadline and is refused; what its successor might read carries the incarnation.

One thread owns all sockets. Wire format: JSON in one frame. No pickle.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from pydantic import ValidationError

from app.errors import StartupError
from app.protocol.messages import MESSAGES, Message, Refusal, Reply, refused

MAX_FRAME_BYTES = 8 * 1024 * 1024
_HIGH_WATER = 1024
_HEARTBEAT_IVL_MS = 250
_HEARTBEAT_TIMEOUT_MS = 1000
_IDLE_S = 60.0
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""What a connection's monitor says when it is gone. It never comes back: RECONNECT_IVL is -1."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How a call ended. ``reply`` is None when no acknowledgement came; then ``not_sent`` tells the two cases apart."""

    reply: Reply | None
    not_sent: bool = False
    detail: str = ""


@dataclass(slots=True)
class _Call:
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
    waiting: deque[_Call] = field(default_factory=deque)
    open: dict[int, _Call] = field(default_factory=dict)


class Link:
    """This node's end of every link.

    ``on_call(call_id, message)`` runs on the link's thread for each incoming call and must not block; somebody
    answers it later with ``reply(call_id, …)``, from any thread.

    Raises StartupError when no port can be taken on ``host``.
    """

    def __init__(self, incarnation: str, host: str, on_call: Callable[[str, Message], None]) -> None:
        self.incarnation = incarnation
        self._on_call = on_call
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._tune(self._router)
        try:
            port = self._router.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(f"BATON_LINK_HOST={host}: cannot listen there ({error})") from error
        self.address = f"tcp://{host}:{port}"
        self._boot = _boot_id()
        self._numbers = itertools.count(1)
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._answering: dict[str, tuple[list[bytes], int]] = {}
        self._todo: deque[Callable[[], None]] = deque()
        self._closing = threading.Event()
        self._wake_in, self._wake_out = self._wake_pair()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    # from any thread

    def call(
        self,
        address: str,
        incarnation: str,
        message: Message,
        timeout_s: float,
        done: Callable[[CallOutcome], None],
    ) -> None:
        """Send ``message`` to ``incarnation`` at ``address``. ``done`` runs once, on the link's thread, within
        ``timeout_s`` plus scheduling."""
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        envelope = {
            "n": number,
            "to": incarnation,
            "from": self.incarnation,
            "boot": self._boot,
            "deadline": deadline,
            "message": message.model_dump(),
        }
        call = _Call(number, address, incarnation, json.dumps(envelope).encode(), deadline, done)
        self._do(lambda: self._start(call))

    def reply(self, call_id: str, reply: Reply) -> None:
        """Answer an incoming call. Unknown or answered ids are ignored: that caller has given up."""
        self._do(lambda: self._send_reply(call_id, reply))

    def close(self) -> None:
        """End the thread and close every socket. Open calls end as unacknowledged."""
        if not self._closing.is_set():
            self._closing.set()
            self._do(lambda: None)
            self._thread.join(timeout=5)

    @property
    def alive(self) -> bool:
        """Whether the link's thread runs."""
        return self._thread.is_alive()

    # on the link's thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                self._poll_peers(poller)
                ready = dict(poller.poll(self._wait_ms()))
                if self._wake_out in ready:
                    self._drain_wakes()
                while self._todo:
                    self._todo.popleft()()
                if self._router in ready:
                    self._read_calls()
                for key, peer in list(self._peers.items()):
                    if peer.socket in ready:
                        self._serve_peer(peer)
                    if peer.monitor in ready:
                        self._drop_peer(key, peer, "connection lost")
                    else:
                        self._expire(key, peer)
        finally:
            self._end_all()

    def _poll_peers(self, poller: zmq.Poller) -> None:
        for socket, _ in list(poller.sockets):
            if socket not in (self._router, self._wake_out):
                poller.unregister(socket)
        for peer in self._peers.values():
            poller.register(peer.socket, zmq.POLLIN | (zmq.POLLOUT if peer.waiting else 0))
            poller.register(peer.monitor, zmq.POLLIN)

    def _wait_ms(self) -> int | None:
        deadlines = [call.deadline for peer in self._peers.values() for call in (*peer.waiting, *peer.open.values())]
        if not deadlines:
            return None
        return max(0, int(1000 * (min(deadlines) - time.monotonic())) + 1)

    def _start(self, call: _Call) -> None:
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

    def _connect(self, address: str) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        self._tune(socket)
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
                answer = json.loads(frame)
                call = peer.open.pop(answer["n"], None)
                reply = Reply.model_validate(answer["reply"])
            except (ValueError, KeyError, TypeError):
                continue  # not an answer: the call it might have been for runs into its deadline
            if call is not None:
                call.done(CallOutcome(reply))

    def _send_waiting(self, peer: _Peer) -> None:
        while peer.waiting:
            try:
                peer.socket.send_multipart([b"", peer.waiting[0].frame], zmq.NOBLOCK)
            except zmq.Again:
                return  # not connected yet, or full: POLLOUT or the deadline comes next
            call = peer.waiting.popleft()
            call.sent = True
            peer.open[call.number] = call

    def _expire(self, key: tuple[str, str], peer: _Peer) -> None:
        """After a missed deadline the socket goes, so that nothing sent on it can be delivered later."""
        now = time.monotonic()
        calls = (*peer.waiting, *peer.open.values())
        if any(call.deadline <= now for call in calls) or (not calls and peer.used < now - _IDLE_S):
            self._drop_peer(key, peer, "no acknowledgement in time")

    def _drop_peer(self, key: tuple[str, str], peer: _Peer, why: str) -> None:
        """Calls that were sent end here as unacknowledged, the others as not sent."""
        del self._peers[key]
        self._close_peer(peer)
        for call in peer.open.values():
            call.done(CallOutcome(None, not_sent=False, detail=f"{call.address}: {why}"))
        for call in peer.waiting:
            call.done(CallOutcome(None, not_sent=True, detail=f"{call.address}: not reachable"))

    # incoming calls

    def _read_calls(self) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route, frame = frames[:-1], frames[-1]
            number = 0
            try:
                envelope = json.loads(frame)
                number = int(envelope["n"])
                refusal = self._refusal(envelope)
                if refusal is None:
                    message = MESSAGES.validate_python(envelope["message"], strict=False)
            except (ValidationError, ValueError, KeyError, TypeError) as error:
                refusal = refused(Refusal.MALFORMED, f"{type(error).__name__}: {error}"[:200])
            if refusal is not None:
                self._send(route, number, refusal)
                continue
            call_id = f"{envelope['from']}:{number}"
            self._answering[call_id] = (route, number)
            self._on_call(call_id, message)

    def _refusal(self, envelope: dict[str, object]) -> Reply | None:
        if envelope["to"] != self.incarnation:
            return refused(Refusal.INCARNATION, f"this is {self.incarnation}")
        # Monotonic clocks compare only within one boot of one host; across hosts the fence decides.
        deadline = envelope["deadline"]
        if not isinstance(deadline, int | float):
            raise TypeError("deadline is no number")
        if envelope["boot"] == self._boot and deadline < time.monotonic():
            return refused(Refusal.EXPIRED)
        return None

    def _send_reply(self, call_id: str, reply: Reply) -> None:
        waiting = self._answering.pop(call_id, None)
        if waiting is not None:
            self._send(*waiting, reply)

    def _send(self, route: list[bytes], number: int, reply: Reply) -> None:
        frame = json.dumps({"n": number, "reply": reply.model_dump()}).encode()
        try:
            self._router.send_multipart([*route, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # the caller is gone or does not read: its deadline tells it

    # plumbing

    def _do(self, what: Callable[[], None]) -> None:
        self._todo.append(what)
        with self._wake_lock:
            try:
                self._wake_in.send(b"", zmq.NOBLOCK)
            except zmq.ZMQError:
                return  # closed, or so many wake-ups wait already that the thread will look anyway

    def _drain_wakes(self) -> None:
        while True:
            try:
                self._wake_out.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _wake_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        self._wake_lock = threading.Lock()
        endpoint = f"inproc://wake-{id(self)}"
        out = self._context.socket(zmq.PULL)
        out.bind(endpoint)
        into = self._context.socket(zmq.PUSH)
        into.connect(endpoint)
        return into, out

    @staticmethod
    def _tune(socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_IVL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)

    def _end_all(self) -> None:
        self._closing.set()
        for key, peer in list(self._peers.items()):
            self._drop_peer(key, peer, "this node is closing")
        with self._wake_lock:
            self._context.destroy(linger=0)


def _boot_id() -> str:
    """Identity of this boot of this host: monotonic clocks compare only within it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
