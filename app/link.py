"""ZMQ between nodes: acknowledged calls with a deadline, addressed to an incarnation.

A call ends in exactly one of four ways, and never later than its deadline: accepted, refused with a reason,
*not sent* (certainly), or *unacknowledged* (the peer may or may not have acted: ask the ledger). Nothing is cached
for a peer that is away: a socket queues only while it is connected (IMMEDIATE), a message waits for that connection
no longer than its deadline, and a socket that missed a deadline sends nothing more; its successor starts empty. What a
frozen peer reads late carries its deadline and is refused; what its successor might read carries the incarnation.

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
from pydantic import Field, JsonValue, ValidationError

from app.errors import StartupError
from app.protocol.messages import MESSAGES, Id, Message, Refusal, Reply, refused
from app.schemas import Frozen
from app.versions import SPOKEN, written_as

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


class Envelope(Frozen):
    """A call on the wire. ``deadline`` is monotonic time, which compares only within one ``boot`` of one host."""

    number: int = Field(ge=1)
    to: Id
    sender: Id
    boot: str
    deadline: float = Field(allow_inf_nan=False)
    message: JsonValue


class Answer(Frozen):
    """The reply to call ``number`` on the wire."""

    number: int
    reply: Reply

    def written_as(self, version: int) -> bytes:
        """As a frame for readers of ``version``."""
        return json.dumps({"number": self.number, "reply": written_as(self.reply, version)}).encode()


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

    ``on_crash(name, error)`` runs on it when it dies of an exception; calls end as not sent from then on.

    Raises StartupError when no port can be taken on ``host``.
    """

    name = "link"

    def __init__(
        self,
        incarnation: str,
        host: str,
        on_call: Callable[[str, Message], None],
        on_crash: Callable[[str, BaseException], None],
    ) -> None:
        self.incarnation = incarnation
        self.version = SPOKEN.oldest
        """How messages are written: what the ledger last said."""
        self._on_call = on_call
        self._on_crash = on_crash
        self._context = self._new_context()
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
        self._retired: list[_Peer] = []
        """Connections that missed a deadline: nothing more is sent on them, but open calls may still be answered."""
        self._answering: dict[str, tuple[list[bytes], int]] = {}
        self._todo: deque[_Call | Callable[[], None]] = deque()
        self._closing = threading.Event()
        self._ended = threading.Event()
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
        envelope = Envelope(
            number=number,
            to=incarnation,
            sender=self.incarnation,
            boot=self._boot,
            deadline=deadline,
            message=written_as(message, self.version),
        )
        self._do(_Call(number, address, incarnation, envelope.model_dump_json().encode(), deadline, done))

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
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - ends the process
            self._on_crash(self.name, error)
        finally:
            self._end_all()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        while not self._closing.is_set():
            self._poll_peers(poller)
            ready = dict(poller.poll(self._wait_ms()))
            if self._wake_out in ready:
                self._drain_wakes()
            while self._todo:
                todo = self._todo.popleft()
                self._start(todo) if isinstance(todo, _Call) else todo()
            if self._router in ready:
                self._read_calls()
            for key, peer in [*self._peers.items(), *((None, retired) for retired in self._retired)]:
                if peer.socket in ready:
                    self._serve_peer(peer)
                if peer.monitor in ready:
                    self._drop_peer(key, peer, "connection lost")
                else:
                    self._expire(key, peer)

    def _poll_peers(self, poller: zmq.Poller) -> None:
        for socket, _ in list(poller.sockets):
            if socket not in (self._router, self._wake_out):
                poller.unregister(socket)
        for peer in self._all_peers():
            poller.register(peer.socket, zmq.POLLIN | (zmq.POLLOUT if peer.waiting else 0))
            poller.register(peer.monitor, zmq.POLLIN)

    def _wait_ms(self) -> int | None:
        deadlines = [call.deadline for peer in self._all_peers() for call in (*peer.waiting, *peer.open.values())]
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
                    self._start(call)
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
    def _end_unacknowledged(call: _Call, why: str) -> None:
        call.done(CallOutcome(None, not_sent=False, detail=f"{call.address}: {why}"))

    # incoming calls

    def _read_calls(self) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._read_call(frames[:-1], frames[-1])

    def _read_call(self, route: list[bytes], frame: bytes) -> None:
        """Anybody can send anything here: what is not a call at all gets no answer, the rest is refused by name."""
        try:
            envelope = Envelope.model_validate_json(frame)
        except ValidationError:
            return
        refusal, message = self._check(envelope)
        if message is None:
            self._send(route, envelope.number, refusal)
            return
        call_id = f"{envelope.sender}:{envelope.number}"
        self._answering[call_id] = (route, envelope.number)
        self._on_call(call_id, message)

    def _check(self, envelope: Envelope) -> tuple[Reply, Message | None]:
        if envelope.to != self.incarnation:
            return refused(Refusal.INCARNATION, f"this is {self.incarnation}"), None
        if envelope.boot == self._boot and envelope.deadline < time.monotonic():  # else the fence decides
            return refused(Refusal.EXPIRED), None
        try:
            return refused(Refusal.NONE), MESSAGES.validate_python(envelope.message)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = Refusal.VERSION if first["loc"][-1:] == ("v",) else Refusal.MALFORMED
            return refused(reason, str(first)[:200]), None

    def _send_reply(self, call_id: str, reply: Reply) -> None:
        waiting = self._answering.pop(call_id, None)
        if waiting is not None:
            self._send(*waiting, reply)

    def _send(self, route: list[bytes], number: int, reply: Reply) -> None:
        frame = Answer(number=number, reply=reply).written_as(self.version)
        try:
            self._router.send_multipart([*route, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # the caller is gone or does not read: its deadline tells it

    # plumbing

    def _do(self, what: _Call | Callable[[], None]) -> None:
        self._todo.append(what)
        if self._ended.is_set():
            self._refuse_todo()
            return
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

    def _new_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        return zmq.Context()

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
        for key, peer in [*self._peers.items(), *((None, retired) for retired in self._retired)]:
            self._drop_peer(key, peer, "this node is closing")
        with self._wake_lock:
            self._context.destroy(linger=0)
        self._ended.set()
        self._refuse_todo()

    def _refuse_todo(self) -> None:
        """Calls that came after the end were certainly not sent."""
        while self._todo:
            try:
                todo = self._todo.popleft()
            except IndexError:
                return  # another thread was faster
            if isinstance(todo, _Call):
                todo.done(CallOutcome(None, not_sent=True, detail="this node's link has ended"))


def _boot_id() -> str:
    """Identity of this boot of this host: monotonic clocks compare only within it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
