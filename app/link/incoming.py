"""The calls that a node takes: checked, handed over, and answered by whoever knows the answer."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq
from pydantic import ValidationError

from app.errors import StartupError
from app.link.wire import Answer, Envelope, boot_id, tune
from app.protocol.messages import MESSAGES, Message, Refusal, Reply, refused


class Incoming:
    """The socket on which peers call. One thread owns it.

    ``on_call(call_id, message)`` must not block. Raises StartupError when no port can be taken on ``host``.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        incarnation: str,
        host: str,
        on_call: Callable[[str, Message], None],
    ) -> None:
        self._incarnation = incarnation
        self._on_call = on_call
        self._answering: dict[str, tuple[list[bytes], int]] = {}
        self.socket = context.socket(zmq.ROUTER)
        tune(self.socket)
        try:
            port = self.socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            raise StartupError(f"BATON_LINK_HOST={host}: cannot listen there ({error})") from error
        self.address = f"tcp://{host}:{port}"

    def read(self, version: int) -> None:
        """Take every call that is there. What is refused at once is written for readers of ``version``."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._read_call(frames[:-1], frames[-1], version)

    def _read_call(self, route: list[bytes], frame: bytes, version: int) -> None:
        """Anybody can send anything here: what is not a call at all gets no answer, the rest is refused by name."""
        try:
            envelope = Envelope.model_validate_json(frame)
        except ValidationError:
            return
        refusal, message = self._check(envelope)
        if message is None:
            self._send(route, envelope.number, refusal, version)
            return
        call_id = f"{envelope.sender}:{envelope.number}"
        self._answering[call_id] = (route, envelope.number)
        self._on_call(call_id, message)

    def _check(self, envelope: Envelope) -> tuple[Reply, Message | None]:
        if envelope.to != self._incarnation:
            return refused(Refusal.INCARNATION, f"this is {self._incarnation}"), None
        if envelope.boot == boot_id() and envelope.deadline < time.monotonic():  # else the fence decides
            return refused(Refusal.EXPIRED), None
        try:
            return refused(Refusal.NONE), MESSAGES.validate_python(envelope.message)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = Refusal.VERSION if first["loc"][-1:] == ("v",) else Refusal.MALFORMED
            return refused(reason, str(first)[:200]), None

    def reply(self, call_id: str, reply: Reply, version: int) -> None:
        """Answer a call. Unknown or answered ids are ignored: that caller has given up."""
        waiting = self._answering.pop(call_id, None)
        if waiting is not None:
            self._send(*waiting, reply, version)

    def _send(self, route: list[bytes], number: int, reply: Reply, version: int) -> None:
        frame = Answer(number=number, reply=reply).written_as(version)
        try:
            self.socket.send_multipart([*route, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # the caller is gone or does not read: its deadline tells it
