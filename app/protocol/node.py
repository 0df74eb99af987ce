"""What both machines share: events in, effects out; bells and the work they bring; registration and drain.

A machine is driven by ``receive(event, now)`` and ``poll(now)``; both return the effects to do, in order. ``now`` is
any monotonic time in seconds. Nothing here waits, draws random numbers (``draw`` is given) or talks to anybody.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.blocks import BlockPool
from app.protocol.commands import Bell
from app.protocol.holding import H, Holding, NodeConfig
from app.protocol.messages import Reply

_REGISTER_AGAIN_S = 0.1
LOOK_TRIES = 4
"""Repeats of a question for work. What it may have brought all the same is handed back by the comparison."""


class Node(Holding[H]):
    """One node's side of the protocol, as a pure machine. ``table`` holds its work by fence or lease id."""

    queue: str
    """The queue whose bells this role hears: "prefill" or "decode"."""

    def __init__(self, config: NodeConfig, pool: BlockPool, draw: Callable[[], str]) -> None:
        super().__init__(config, pool)
        self.draining = False
        self.registered = False
        self._draw = draw
        self._bells: deque[on.BellRang] = deque()
        self._starved = self._was_starved = False
        self._self_rung = False
        self._registering = False

    # what the host drives

    def receive(self, event: on.Event, now: float) -> list[do.Effect]:
        """Take in what happened; returns what to do about it."""
        self._now = max(self._now, now)
        match event:
            case on.BellRang():
                self._bell_rang(event)
            case on.Answered():
                self._answered(event)
            case on.AskFailed():
                self._ask_failed(event)
            case on.Called():
                reply = self._called(event)
                if reply is not None:
                    self._reply(event, reply)
            case on.CallEnded():
                self._call_ended(event)
            case on.Stepped():
                for sample in event.samples:
                    self._sampled(sample)
            case on.Stopped() | on.Sealed() | on.Checked() | on.Pulled():
                self._worked(event)
            case _:
                self._told(event)
        return self._flush()

    @property
    def wants_bells(self) -> bool:
        """Whether this node takes another bell: it has room, and none waits already. A full node stops consuming, so
        that the bells stay where other nodes find them."""
        busy = self._asking_for_work or self._bells
        return self.registered and not self.draining and not busy and self._has_room()

    @property
    def idle(self) -> bool:
        """Whether nothing is held and nothing is on its way."""
        return not self.table and not self._asking_for_work

    @abstractmethod
    def gauges(self) -> Mapping[str, int]:
        """``running`` and ``waiting`` sequences."""

    def cache_counts(self) -> Mapping[str, int]:
        """What the prefix cache has done; empty where there is none."""
        return {}

    # what each role does

    @abstractmethod
    def _ask_for_work(self, bell: on.BellRang) -> None:
        """Ask the ledger for one piece of work on behalf of ``bell``; ends in ``_work_answered``."""

    @abstractmethod
    def _called(self, call: on.Called) -> Reply | None:
        """Act on a peer's message; None when the reply comes later."""

    @abstractmethod
    def _sampled(self, sample: on.Sample) -> None: ...

    @abstractmethod
    def _worked(self, event: on.Stopped | on.Sealed | on.Checked | on.Pulled) -> None:
        """Engine or mover are done with something."""

    @abstractmethod
    def _drain(self) -> None: ...

    def _told(self, event: on.HostEvent) -> None:
        """What the host decides about the whole node."""
        match event:
            case on.Registered():
                if not self.registered:
                    self.registered = True
                    self._starved = True  # look at once: bells may have rung before we came
                    self._check_holdings()
                    self._ring_self_if_room()
            case on.RegistrationLost():
                self._lost_registration()
            case on.LedgerRestarted():
                self._check_holdings()
            case on.DrainAsked():
                self.draining = True
                self._drop_bells("draining")
                self._drain()
                if event.hand_back_after_s is not None:
                    self._at(event.hand_back_after_s, self._hand_back_all)
            case on.HandBackAsked():
                self._hand_back_all()

    # bells and work

    def _bell_rang(self, bell: on.BellRang) -> None:
        if not bell.uid:
            self._self_rung = False
        self._bells.append(bell)
        self._look_for_work()

    def _has_room(self) -> bool:
        return self.pool.free > 0 and len(self.table) < self.config.max_num_seqs

    def _look_for_work(self) -> None:
        """Ask for work for the first bell that waits. One such question at a time: room is counted once."""
        if self._asking_for_work or not self._bells:
            return
        if self.draining or not self.registered:
            self._drop_bells("draining" if self.draining else "not registered")
            return
        if self._has_room():
            self._asking_for_work = True
            self._was_starved, self._starved = self._starved, False
            self._ask_for_work(self._bells.popleft())

    def _work_answered(self, bell: on.BellRang, found: bool, outcome: str = "", *, queue_empty: bool = False) -> None:
        """The question for work is answered; without work the bell's task ends here."""
        self._asking_for_work = False
        if not found:
            self._done(bell.bell_id, outcome or "nothing to do")
        if not queue_empty:
            # Where there was none for now, or some that no bell had told us of, there may be more.
            self._starved = self._starved or self._was_starved or not found or not bell.uid
        self._look_for_work()
        if found:
            self._ring_self_if_room()

    def _freed(self) -> None:
        """Blocks came back: whoever waits may fit now."""
        self._look_for_work()
        self._ring_self_if_room()

    def _work_waits(self) -> None:
        self._starved = True
        self._ring_self_if_room()

    def _ring_self_if_room(self) -> None:
        if self._starved and self.wants_bells and not (self._bells or self._asking_for_work or self._self_rung):
            self._starved = False
            self._self_rung = True
            self._out.append(do.RingSelf())
            self._at(self.config.check_s, self._forget_self_rung)

    def _forget_self_rung(self) -> None:
        self._self_rung = False  # that bell may be lost, as any

    def _drop_bells(self, outcome: str) -> None:
        """Somebody else shall hear them."""
        while self._bells:
            bell = self._bells.popleft()
            self._done(bell.bell_id, outcome)
            if bell.uid:
                self._ring(Bell(self.queue, bell.uid, bell.attempt))

    def _done(self, bell_id: str, outcome: str) -> None:
        if bell_id:
            self._out.append(do.BellDone(bell_id, outcome))

    # registration

    def _lost_registration(self) -> None:
        """The ledger declared us dead: nothing we hold is ours any more. Register again once it is all let go."""
        self.registered = False
        for key in sorted(self._holds()):
            self._let_go(key)
        if not self._registering:
            self._register_when_idle()

    def _register_when_idle(self) -> None:
        self._registering = False
        if self.registered or self.draining:
            return
        if self.idle:
            self._out.append(do.Register())
        else:
            self._registering = True
            self._at(_REGISTER_AGAIN_S, self._register_when_idle)
