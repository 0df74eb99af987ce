"""What a machine asks for and waits for: ledger commands until they are answered, calls between nodes, timers.

What is to happen then is a bound method with its first arguments (``functools.partial``), never a closure: a machine is
a value that can be copied, so that a search can try every continuation of one moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Command
from app.protocol.messages import Message, Reply

_RETRY_FIRST_S = 0.1
_RETRY_MOST_S = 1.0


@dataclass(slots=True)
class _Question:
    """A ledger command on its way."""

    command: Command
    then: Callable[[Any], None]
    tries: int
    """How often it is asked again before it is given up; 0: never, -1: without end."""
    wait_s: float = _RETRY_FIRST_S


class Asking:
    """Collects effects in order, and calls back when what they asked for has come."""

    def __init__(self) -> None:
        self.refusals: dict[str, int] = {}
        """Peers' calls that were refused, by reason."""
        self._now = 0.0
        self._out: list[do.Effect] = []
        self._tags = 0
        self._questions: dict[int, _Question] = {}
        self._calls: dict[int, Callable[[on.CallEnded], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def poll(self, now: float) -> list[do.Effect]:
        """Let time pass: runs every timer that is due."""
        self._now = max(self._now, now)
        while self._timers and self._timers[0][0] <= self._now:
            heapq.heappop(self._timers)[2]()
        return self._flush()

    @property
    def next_deadline(self) -> float | None:
        """When ``poll`` wants to be called next, or None."""
        return self._timers[0][0] if self._timers else None

    # ledger questions

    def _ask(self, command: Command, then: Callable[[Any], None], *, tries: int = -1) -> None:
        """Ask the ledger; ``then`` gets the answer. The same command is asked again until it is answered: every one
        is safe to repeat (rule 2), and LATE changed nothing. After ``tries`` repeats ``then`` gets None."""
        self._send_question(_Question(command, then, tries))

    def _send_question(self, question: _Question) -> None:
        self._tags += 1
        self._questions[self._tags] = question
        self._out.append(do.Ask(self._tags, question.command))

    def _answered(self, event: on.Answered) -> None:
        question = self._questions.pop(event.tag, None)
        if question is None:
            return  # a doubled answer
        if getattr(event.answer, "status", "") == "LATE":
            self._ask_again(question)
        else:
            question.then(event.answer)

    def _ask_failed(self, event: on.AskFailed) -> None:
        question = self._questions.pop(event.tag, None)
        if question is None:
            return
        if question.wait_s == _RETRY_FIRST_S:  # once per outage, not once per try
            fields = {"command": question.command.name, "detail": event.detail}
            self._out.append(do.Log("no answer", getattr(question.command, "uid", ""), fields, "warning"))
        self._ask_again(question)

    def _ask_again(self, question: _Question) -> None:
        if question.tries == 0:
            question.then(None)
            return
        question.tries -= 1
        self._at(question.wait_s, partial(self._send_question, question))
        question.wait_s = min(2 * question.wait_s, _RETRY_MOST_S)

    # calls between nodes

    def _call(
        self, address: str, incarnation: str, message: Message, timeout_s: float, then: Callable[[on.CallEnded], None]
    ) -> None:
        self._tags += 1
        self._calls[self._tags] = then
        self._out.append(do.Call(self._tags, address, incarnation, message, timeout_s))

    def _call_ended(self, event: on.CallEnded) -> None:
        then = self._calls.pop(event.tag, None)
        if then is not None:
            then(event)

    def _reply(self, call: on.Called, reply: Reply) -> None:
        """Answer a peer's call; a refusal is counted and logged."""
        if not reply.accepted:
            self.refusals[reply.reason] = self.refusals.get(reply.reason, 0) + 1
            fields = {"message": call.message.kind, "reason": str(reply.reason), "detail": reply.detail}
            self._out.append(do.Log("refused", call.message.uid, fields, "warning"))
        self._out.append(do.ReplyTo(call.call_id, reply))

    @staticmethod
    def _whatever(outcome: object) -> None:
        """What does not depend on its outcome."""

    # time

    def _at(self, in_s: float, what: Callable[[], None]) -> None:
        self._tags += 1
        heapq.heappush(self._timers, (self._now + in_s, self._tags, what))

    def _flush(self) -> list[do.Effect]:
        out, self._out = self._out, []
        return out
