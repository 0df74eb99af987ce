"""What goes into a node machine: everything that can happen to a node, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from app.protocol.commands import Answer, FailureKind
from app.protocol.messages import Message, Reply
from app.schemas import FinishReason, KVLocation


@dataclass(frozen=True, slots=True)
class BellRang:
    """A doorbell: a Celery task ``bell_id`` that stays in flight until BellDone. The ids are only a hint."""

    bell_id: str
    uid: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The ledger's answer to Ask(tag)."""

    tag: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class AskFailed:
    """Ask(tag) got no answer. Whether it was applied, or will be, nobody knows."""

    tag: int
    detail: str


@dataclass(frozen=True, slots=True)
class Called:
    """A peer's message; ``call_id`` goes into ReplyTo."""

    call_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class CallEnded:
    """How Call(tag) ended: the peer's reply; or none, and ``detail`` says how."""

    tag: int
    reply: Reply | None
    detail: str = ""


NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence's outcome of an engine step: a token at an index of the answer, or an error of this sequence.

    A finish reason with NO_TOKEN: the output that it came with had ended the answer already (the end was lost in a
    rollback); nothing was computed.
    """

    key: str
    index: int
    token: int
    finish_reason: FinishReason | None = None
    error: str = ""
    retry_helps: bool = True
    """Of an error: whether another try may go better."""
    engine_s: float = 0.0
    """Seconds of engine steps that this sequence has taken part in since it came."""
    logprobs: str = ""
    """Of the token, packed as in ``app.logprobs``, if the request asks for them."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token, if there is one."""
        return () if self.token == NO_TOKEN else (self.token,)

    @property
    def all_logprobs(self) -> tuple[str, ...]:
        """One for each of ``tokens``, or none."""
        return (self.logprobs,) if self.logprobs else ()

    @property
    def failure(self) -> FailureKind:
        """What an error means for the request."""
        return FailureKind.FAILURE if self.retry_helps else FailureKind.FINAL


@dataclass(frozen=True, slots=True)
class Stepped:
    """An engine step ended. Sequences with a finish reason or an error have left the engine."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The engine has dropped sequence ``key`` and will not touch its blocks again. Answers Stop."""

    key: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """The blocks of ``key`` were digested under the pin. Answers Seal."""

    key: str
    location: KVLocation | None
    digests: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the blocks of ``key`` hold now has these digests. Answers Check."""

    key: str
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """The mover has stopped writing for ``key``; ``reason`` is empty when everything arrived. Answers Pull."""

    key: str
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RegistrationLost:
    """The ledger does not know this node (any more)."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The node is (again) in the ledger."""


@dataclass(frozen=True, slots=True)
class LedgerRestarted:
    """The ledger's server began a new life (restart, failover): what it says may have changed."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take nothing new; finish or hand back what is here. Asking again changes nothing; the earliest time counts."""

    hand_back_after_s: float | None = None
    """Whatever is still here then is given back; None: whoever asked says so itself."""


@dataclass(frozen=True, slots=True)
class HandBackAsked:
    """Give back whatever is still here, now: the drain's time is over."""


HostEvent = Registered | RegistrationLost | LedgerRestarted | DrainAsked | HandBackAsked
"""What the host says about the whole node."""
Event = BellRang | Answered | AskFailed | Called | CallEnded | Stepped | Stopped | Sealed | Checked | Pulled | HostEvent
