"""A node's host that looks, at each step of a request, whether an order waits for it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.kv import KVPool, KVTransport
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import (
    Activate,
    ActivateAnswer,
    ActivateStatus,
    Answer,
    Claim,
    ClaimAnswer,
    Command,
    Emit,
    EmitAnswer,
    EmitStatus,
    ReserveAnswer,
    ReserveNext,
    ReserveStatus,
)
from app.protocol.messages import Commit, Grant, Message
from app.schemas import KVLocation
from app.settings import Settings
from workers.failpoints.link import CutLink
from workers.failpoints.orders import Orders, Point
from workers.failpoints.wrong_bytes import WrongBytes
from workers.host import NodeHost
from workers.machine import KVRole
from workers.mover import Mover

if TYPE_CHECKING:
    from workers.engine.sequence import StepOutput

MIDDLE = 8
"""Index of the token at which MID_DECODE is."""


class FailingHost(NodeHost):
    """A NodeHost with failpoints: the same lanes, and a look at the orders between them."""

    def __init__(self, settings: Settings, role: KVRole, *others: Any) -> None:
        """As of ``NodeHost``."""
        self._orders = Orders(Path(settings.failpoints), role)
        self._asked: dict[int, Command] = {}
        self._called: dict[int, Message] = {}
        self._sealing: tuple[int, ...] = ()
        self._link_class = partial(CutLink, self._orders)
        super().__init__(settings, role, *others)
        engine = self._engine
        self._wrong_bytes = WrongBytes(engine.pool)
        engine.step = partial(self._step, engine.step)  # type: ignore[method-assign]
        self._halving = HalvingTransport(self._transport, self._orders)
        self._mover = Mover(engine, self._halving, self._between_steps)

    def _ask(self, questions: list[do.Ask]) -> None:
        for question in questions:
            self._asked[question.tag] = question.command
            match question.command:
                case Claim():
                    self._orders.reached(Point.BEFORE_CLAIM, "")
                case Emit() as emit if emit.finish_reason is not None:
                    self._orders.reached(Point.LAST_TOKEN, emit.uid)
        super()._ask(questions)

    def _call(self, call: do.Call) -> None:
        self._called[call.tag] = call.message
        super()._call(call)

    def _move(self, jobs: list[do.Seal | do.Check | do.Pull]) -> None:
        for job in jobs:
            if isinstance(job, do.Pull):
                self._orders.reached(Point.AFTER_COMMIT, job.key)
                self._halving.key = job.key
            elif isinstance(job, do.Seal):
                self._sealing = job.blocks
            super()._move([job])

    def _post(self, event: on.Event) -> None:
        match event:
            case on.Answered():
                self._answered(self._asked.pop(event.tag), event.answer)
            case on.AskFailed():
                self._asked.pop(event.tag)
            case on.Called(_, Grant() as grant):
                self._orders.reached(Point.AFTER_GRANT, grant.uid)
            case on.CallEnded():
                self._call_ended(self._called.pop(event.tag), event)
            case on.Stepped():
                for sample in event.samples:
                    if sample.index == MIDDLE:
                        self._orders.reached(Point.MID_DECODE, sample.key)
            case on.Sealed():
                event = self._sealed(event)
        super()._post(event)

    def _answered(self, command: Command, answer: Answer) -> None:
        match command, answer:
            case Claim(), ClaimAnswer() if answer.work is not None:
                self._orders.know(answer.work.client_id, answer.work.uid, answer.work.fence)
                self._orders.reached(Point.AFTER_CLAIM, answer.work.uid)
            case ReserveNext(), ReserveAnswer(ReserveStatus.RESERVED):
                self._orders.know(answer.client_id, answer.uid, command.lease_id)
                self._orders.reached(Point.AFTER_RESERVE, answer.uid)
            case Activate(), ActivateAnswer(ActivateStatus.ACTIVATED):
                self._orders.reached(Point.AFTER_ACTIVATE, command.uid)
            case Emit(), EmitAnswer(EmitStatus.OK):
                ended = command.finish_reason is not None
                self._orders.reached(Point.AFTER_LAST_TOKEN if ended else Point.AFTER_FIRST_TOKEN, command.uid)

    def _call_ended(self, message: Message, event: on.CallEnded) -> None:
        if event.reply is not None and event.reply.accepted:
            if isinstance(message, Grant):
                self._orders.reached(Point.AFTER_GRANT, message.uid)
            elif isinstance(message, Commit):
                self._orders.reached(Point.AFTER_COMMIT, message.uid)

    def _sealed(self, event: on.Sealed) -> on.Sealed:
        action = self._orders.reached(Point.SEALED, event.key)
        if action is None or event.location is None:
            return event
        return replace(event, location=self._wrong_bytes.spoil(action, event.location, self._sealing))

    def _step(
        self, step: Callable[..., list[StepOutput]], on_start: Callable[[list[str]], None] | None = None
    ) -> list[StepOutput]:
        took_part: list[str] = []

        def started(keys: list[str]) -> None:
            took_part.extend(keys)
            if on_start is not None:
                on_start(keys)

        outputs = step(on_start=started)
        for key in set(took_part) - {output.key for output in outputs}:
            self._orders.reached(Point.HALF_PREFILLED, key)
        return outputs


class HalvingTransport:
    """Pulls the first half, looks at the orders, and pulls everything."""

    def __init__(self, transport: KVTransport, orders: Orders) -> None:
        self._transport = transport
        self._orders = orders
        self.key = ""
        """Lease whose blocks are pulled now."""

    def pull(
        self,
        location: KVLocation,
        src_blocks: Sequence[int],
        generations: Sequence[int],
        digests: Sequence[bytes],
        into: KVPool,
        dst_blocks: Sequence[int],
    ) -> None:
        half = len(src_blocks) // 2
        if half:
            some = slice(half)
            self._transport.pull(location, src_blocks[some], generations[some], digests[some], into, dst_blocks[some])
        self._orders.reached(Point.DURING_PULL, self.key)
        self._transport.pull(location, src_blocks, generations, digests, into, dst_blocks)

    def forget_gone(self) -> None:
        self._transport.forget_gone()

    def close(self) -> None:
        self._transport.close()
