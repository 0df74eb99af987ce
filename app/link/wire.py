"""What travels on a link, and how a call on it can end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zmq
from pydantic import Field, JsonValue

from app.protocol.messages import Id, Reply
from app.schemas import Frozen
from app.versions import written_as

MAX_FRAME_BYTES = 8 * 1024 * 1024
_HIGH_WATER = 1024
_HEARTBEAT_IVL_MS = 250
_HEARTBEAT_TIMEOUT_MS = 1000


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


def tune(socket: zmq.Socket[bytes]) -> None:
    """What every socket of a link has in common."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_IVL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


@cache
def boot_id() -> str:
    """Identity of this boot of this host: monotonic clocks compare only within it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
