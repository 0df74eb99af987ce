"""The clients: what each wishes, when it leaves or cancels, what it gets, and whether that is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.protocol.commands import Limits
from app.protocol.tables import FailureReason
from app.schemas import FinishReason, SamplingParams
from tests.sim.model import EOS, logprobs_of, reference, tied_answer
from tests.sim.process import Process
from tests.sim.web import Web

if TYPE_CHECKING:
    from tests.sim.world import World

_READMIT_AFTER_S = 0.001


@dataclass(frozen=True, slots=True)
class Wish:
    """One request as a client sends it."""

    at_s: float
    web: str
    client_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    limits: Limits
    leaves_after_s: float | None = None
    """The connection closes so long after it was opened."""
    cancels_after_s: float | None = None
    key: str = ""
    """Its Idempotency-Key."""
    salt: str = ""
    cancels_at: str = ""
    """Name of the web process that the cancellation goes to."""
    then: Wish | None = None
    """Sent as soon as this one has ended."""
    more: tuple[Wish, ...] = ()
    """Further sequences of the same request; prompt and sampling are theirs, all else is this one's."""

    @property
    def body(self) -> str:
        """What is asked for; the same body has the same answer."""
        return f"{self.prompt} {self.sampling}{''.join(f' and {other.body}' for other in self.more)}"

    @property
    def choices(self) -> tuple[Wish, ...]:
        """One wish for each sequence."""
        return (self, *self.more)

    def with_choices(self, *choices: tuple[tuple[int, ...], SamplingParams]) -> Wish:
        """The same request with these further sequences."""
        alone = replace(self, more=(), then=None)
        more = tuple(replace(alone, prompt=prompt, sampling=sampling) for prompt, sampling in choices)
        return replace(self, more=more)

    @property
    def answer(self) -> tuple[int, ...]:
        """What an undisturbed run answers."""
        sampling = self.sampling
        return reference(self.prompt, sampling.seed, sampling.max_tokens, sampling.ignore_eos)

    def begins(self, tokens: Sequence[int], *, ties: bool) -> bool:
        """Whether ``tokens`` are the beginning of the answer, or (with ``ties``) of one that may be drawn instead."""
        if not ties:
            return tuple(tokens) == self.answer[: len(tokens)]
        ended = EOS in tokens[:-1] and not self.sampling.ignore_eos
        return not ended and tied_answer(self.prompt, self.sampling.seed, tokens)

    def finish_reason(self, tokens: Sequence[int]) -> FinishReason | None:
        """How an answer with these tokens ends; None: it does not yet."""
        if tokens and tokens[-1] == EOS and not self.sampling.ignore_eos:
            return "stop"
        return "length" if len(tokens) >= self.sampling.max_tokens else None


class Stream:
    """What one client gets for one wish. Raises Violation as soon as it is wrong."""

    def __init__(self, clients: Clients, wish: Wish) -> None:
        self.wish = wish
        self.uid = ""
        """Of its admission, once there was one."""
        self.web = ""
        """Incarnation of the process that answers it."""
        self.outcome = ""
        self.client_gone = False
        self.tokens: list[list[int]] = [[] for _ in wish.choices]
        """Of each choice."""
        self._open = set(range(len(wish.choices)))
        """The choices that have not ended."""
        self._clients = clients

    def receives(
        self, choice: int, tokens: tuple[int, ...], finish: FinishReason | None, logprobs: tuple[str, ...]
    ) -> None:
        """The next tokens of a choice; with ``finish`` they are its last."""
        self._check_open("tokens")
        wish, got = self.wish.choices[choice], self.tokens[choice]
        if choice not in self._open:
            raise self._wrong(f"got {tokens} after the end of choice {choice}")
        index = len(got)
        got.extend(tokens)
        if not wish.begins(got, ties=self._clients.world.ties):
            raise self._wrong(f"got {tokens} at index {index} of {choice}, not {wish.answer[index:][: len(tokens)]}")
        wanted = wish.sampling.logprobs is not None
        if logprobs != tuple(logprobs_of(token, index + i) for i, token in enumerate(tokens) if wanted):
            raise self._wrong(f"got the logprobs {logprobs} with {tokens} at index {index}")
        if finish is None:
            return
        if finish != wish.finish_reason(got):
            raise self._wrong(f"the end ({finish}) after {got}, not {wish.answer}")
        self._open.discard(choice)
        if not self._open:
            self._ends("finished")

    def failed(self, code: str, detail: str = "") -> None:
        """An explicit error."""
        self._check_open(code)
        if not code:
            raise self._wrong("an error without a code")
        self._ends(code, detail)

    def lost(self, why: str) -> None:
        """The connection broke."""
        self._check_open(why)
        self._ends(why)

    def leaves(self) -> None:
        """The client closes the connection; web has not noticed yet."""
        if not self.outcome:
            self.client_gone = True
            self._ends("left")

    def _check_open(self, what: str) -> None:
        if self.outcome and not self.client_gone:
            raise self._wrong(f"{what} after the end ({self.outcome})")

    def _ends(self, outcome: str, detail: str = "") -> None:
        if not self.outcome:
            self.outcome = outcome
            self._clients.ended(self, detail)

    def _wrong(self, what: str) -> Exception:
        return self._clients.world.violation(f"client {self.wish.client_id}: {what}", self.uid)


class Clients(Process):
    """All clients. They outlive everything."""

    def __init__(self, world: World, wishes: tuple[Wish, ...]) -> None:
        super().__init__(world, "clients")
        self.streams: list[Stream] = []
        self._waiting = len(wishes)
        for wish in wishes:
            self.after(wish.at_s, self._send, wish)

    @property
    def all_answered(self) -> bool:
        """Whether every wish was sent and has its outcome."""
        return not self._waiting and all(stream.outcome for stream in self.streams)

    def add(self, wish: Wish) -> Stream:
        """A wish of now."""
        self._waiting += 1
        return self._send(wish)

    def _send(self, wish: Wish) -> Stream:
        """Open a connection."""
        self._waiting -= 1
        stream = Stream(self, wish)
        self.streams.append(stream)
        web = self.world.current(wish.web)
        if not isinstance(web, Web) or not web.alive:
            stream.lost("connection refused")
            return stream
        stream.web = web.incarnation
        web.after(self.world.pace.network(), web.open, stream)
        if wish.leaves_after_s is not None:
            self.after(wish.leaves_after_s, self._leave, stream)
        if wish.cancels_after_s is not None:
            self.after(wish.cancels_after_s, self._cancel, wish)
        return stream

    def web_died(self, incarnation: str) -> None:
        """Its connections broke."""
        for stream in self.streams:
            if stream.web == incarnation and not stream.outcome:
                stream.lost("connection lost")

    def ended(self, stream: Stream, detail: str) -> None:
        """A stream has its outcome."""
        world, wish = self.world, stream.wish
        world.count_outcome(stream.outcome)
        if FailureReason.DIFFERENT_TOKENS in detail:
            world.count("a client is told that the answer is another one by now")
        world.note("client", "outcome", stream.uid, wish.client_id, stream.outcome, detail)
        if wish.then is not None:
            self._waiting += 1
            self.after(_READMIT_AFTER_S, self._send, wish.then)

    def _leave(self, stream: Stream) -> None:
        stream.leaves()

    def _cancel(self, wish: Wish) -> None:
        web = self.world.current(wish.cancels_at)
        if isinstance(web, Web) and web.alive:
            web.after(self.world.pace.network(), web.cancel, wish.client_id)
