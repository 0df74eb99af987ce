"""What comes out of a node machine: everything a node can do, as frozen values. The host does them, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.protocol.commands import Bell, Command, Work
from app.protocol.messages import Message, Reply
from app.schemas import KVLocation


@dataclass(frozen=True, slots=True)
class Ask:
    """Run a ledger command; comes back as Answered or AskFailed."""

    tag: int
    command: Command


@dataclass(frozen=True, slots=True)
class Call:
    """Send ``message`` to the node ``incarnation`` at ``address``; comes back as CallEnded."""

    tag: int
    address: str
    incarnation: str
    message: Message
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Acknowledge a peer's call."""

    call_id: str
    reply: Reply


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring a doorbell: a Celery message."""

    bell: Bell


@dataclass(frozen=True, slots=True)
class RingSelf:
    """Ring this node's own direct queue: there may be work, so that the work runs as a Celery task too."""


@dataclass(frozen=True, slots=True)
class BellDone:
    """The Celery task ``bell_id`` ends, with ``outcome`` as its result."""

    bell_id: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Start:
    """Give a sequence to the engine. ``num_computed`` positions of prompt + output have their KV in ``blocks``.

    With ``one_token`` the sequence leaves the engine after the first token it samples (prefill).
    """

    key: str
    work: Work
    blocks: tuple[int, ...]
    num_computed: int
    one_token: bool


@dataclass(frozen=True, slots=True)
class Extend:
    """Give a sequence in the engine more blocks, after those that it has. One that has just ended needs none."""

    key: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Take a sequence out of the engine between two steps; comes back as Stopped."""

    key: str


@dataclass(frozen=True, slots=True)
class Seal:
    """Make ``blocks`` readable for a peer and digest them while they are at ``generations``; comes back as Sealed.

    A block with a digest in ``known`` was sealed before, at the same generation: that digest stands.
    """

    key: str
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    known: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """Digest ``blocks`` as they are now; comes back as Checked."""

    key: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Copy a peer's blocks into ours and validate the copy; comes back as Pulled."""

    key: str
    location: KVLocation
    source: tuple[int, ...]
    generations: tuple[int, ...]
    digests: tuple[str, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Register:
    """Register this node in the ledger (again); comes back as Registered once it is."""


@dataclass(frozen=True, slots=True)
class Log:
    """One structured line about a state change. Never holds a prompt's text."""

    event: str
    uid: str
    fields: Mapping[str, str | int] = field(default_factory=dict)
    level: str = "info"


Effect = (
    Ask | Call | ReplyTo | Ring | RingSelf | BellDone | Start | Extend | Stop | Seal | Check | Pull | Register | Log
)
