"""One thread that owns every socket of a node's links."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from app.link.incoming import Incoming
from app.link.outgoing import Call, Outgoing
from app.link.wire import CallOutcome, Envelope, boot_id
from app.protocol.messages import Message, Reply
from app.versions import SPOKEN, written_as


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
        self.entered_at = 0.0
        """When the thread began what it is at; 0 while it waits. For a watchdog."""
        self._on_crash = on_crash
        self._context = self._new_context()
        try:
            self._incoming = Incoming(self._context, incarnation, host, on_call)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._outgoing = Outgoing(self._context)
        self.address = self._incoming.address
        self._numbers = itertools.count(1)
        self._todo: deque[Call | Callable[[], None]] = deque()
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
            boot=boot_id(),
            deadline=deadline,
            message=written_as(message, self.version),
        )
        self._do(Call(number, address, incarnation, envelope.model_dump_json().encode(), deadline, done))

    def reply(self, call_id: str, reply: Reply) -> None:
        """Answer an incoming call. Unknown or answered ids are ignored: that caller has given up."""
        self._do(lambda: self._incoming.reply(call_id, reply, self.version))

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
        while not self._closing.is_set():
            poller = zmq.Poller()
            poller.register(self._incoming.socket, zmq.POLLIN)
            poller.register(self._wake_out, zmq.POLLIN)
            self._outgoing.register(poller)
            self.entered_at = 0.0
            ready = dict(poller.poll(self._wait_ms()))
            self.entered_at = time.monotonic()
            if self._wake_out in ready:
                self._drain_wakes()
            while self._todo:
                todo = self._todo.popleft()
                self._outgoing.start(todo) if isinstance(todo, Call) else todo()
            if self._incoming.socket in ready:
                self._incoming.read(self.version)
            self._outgoing.serve(ready)

    def _wait_ms(self) -> int | None:
        deadline = self._outgoing.next_deadline
        return None if deadline is None else max(0, int(1000 * (deadline - time.monotonic())) + 1)

    # plumbing

    def _do(self, what: Call | Callable[[], None]) -> None:
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

    def _end_all(self) -> None:
        self._closing.set()
        self._outgoing.close()
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
            if isinstance(todo, Call):
                todo.done(CallOutcome(None, not_sent=True, detail="this node's link has ended"))
