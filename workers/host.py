"""One KV node in a worker process: the pure machine and the real parts that do its effects.

=============  ==========================================================================
lane (thread)  does
=============  ==========================================================================
node           drives the machine: events in, effects out; nothing here blocks
engine         model steps
mover          seals, checks and pulls KV blocks
ledger         questions to the ledger, all that wait in one round trip
bells          rings doorbells
link           calls between nodes (in ``app.link``)
heartbeat      registration, heartbeats, scan if nobody else scans
watchdog       looks at all others; a dead or stuck one ends the process
=============  ==========================================================================
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from app.bells import BellLane, Bells
from app.crash import end_refused
from app.errors import LedgerError
from app.heartbeat import HeartbeatThread
from app.kv import KVReader
from app.lane import END, End, Lane, take_all
from app.ledger import Ledger
from app.link import CallOutcome, Link
from app.protocol import effects as do
from app.protocol import events as on
from app.protocol.commands import Bell, Deregister, Drain, NodeStatus
from app.schemas import Gauges, Health, NodeInfo
from app.settings import Settings
from workers.doorbells import Doorbells, NodeBells
from workers.emergency import Emergency
from workers.engine_lane import EngineLane
from workers.last_words import say_last_words
from workers.machine import KVRole, make_machine
from workers.mover import Mover
from workers.watchdog import Pulse, Watchdog

if TYPE_CHECKING:
    from workers.engine.engine import Engine

logger = logging.getLogger("baton.node")

_LAST_BELLS_S = 0.5
"""Of that, for the bells: what is not rung here, the next scan rings."""
_LOOK_AGAIN_S = 0.2


class NodeHost:
    """Runs one prefill or decode node. ``nodename`` is the Celery name of the worker, e.g. ``prefill1@host``.

    ``on_room`` is called on the node's thread when ``wants_bells`` has become true.
    """

    _link_class: Callable[..., Link] = Link

    def __init__(
        self,
        settings: Settings,
        role: KVRole,
        nodename: str,
        engine: Engine,
        incarnation: str,
        ledger: Ledger,
        on_room: Callable[[], None],
    ) -> None:
        self._nodename = nodename
        self._role = role
        self._ledger = ledger
        self._engine = engine
        self._events: SimpleQueue[on.Event | End] = SimpleQueue()
        self._doorbells = Doorbells(on_room)
        self._last_words_s = settings.ledger_timeout_s + 1.0
        """For what this node may still say, whatever it is that does not move: one call without an answer, and some."""
        self._emergency = Emergency(
            nodename,
            stall_s=settings.engine_stall_s,
            last_words_s=self._last_words_s,
            shut=self._doorbells.shut,
            last_words=self._say_last_words,
        )
        crashed = self._emergency.crashed
        self._link = self._link_class(
            incarnation,
            settings.link_host,
            lambda call_id, message: self._post(on.Called(call_id, message)),
            crashed,
        )
        self._machine = make_machine(settings, role, nodename, engine, incarnation, self._link.address)
        self._gauges = Gauges()
        self._idle = True
        self._transport = KVReader()
        self._engine_lane = EngineLane(engine, self._post, crashed)
        self._mover = Mover(engine, self._transport, self._between_steps)
        self._mover_lane: Lane[do.Seal | do.Check | do.Pull] = Lane("mover", self._move, crashed)
        self._moving = ""
        """The handoff that the mover is at, or was at last."""
        self._ledger_lane: Lane[do.Ask] = Lane("ledger", self._ask, crashed)
        self._bells = BellLane(NodeBells(Bells(settings), nodename), crashed)
        node = NodeInfo(
            incarnation=incarnation,
            role=role,
            name=nodename,
            pid=os.getpid(),
            host=socket.gethostname(),
            address=self._link.address,
            model=engine.folder.fingerprint,
            layout=engine.layout,
            num_blocks=engine.pool.num_blocks,
            block_size_tokens=engine.block_size_tokens,
        )
        self._node = node
        self._heartbeat = HeartbeatThread(
            settings,
            ledger,
            node,
            self._vital_signs,
            ring=self._bells.ring,
            on_crash=crashed,
            on_registered=self._registered,
            on_lost=lambda: self._post(on.RegistrationLost()),
            on_refused=partial(end_refused, nodename),
            on_draining=lambda: self._post(on.DrainAsked(settings.drain_timeout_s)),
            on_ledger_restarted=lambda: self._post(on.LedgerRestarted()),
            after_beat=self._after_beat,
        )
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)
        self._pulse = Pulse("node", self._thread.is_alive)
        lanes = (self._engine_lane, self._mover_lane, self._ledger_lane, self._bells)
        self._watchdog = Watchdog(
            (*lanes, self._link, self._heartbeat, self._pulse),
            settings.engine_stall_s,
            settings.heartbeat_s,
            crashed,
            self._emergency.watched,
        )
        self._changed = threading.Condition()

    # what the Celery pool calls

    def start(self) -> None:
        """Start every lane. Bells are taken from now on; work comes once the node is registered."""
        for lane in (self._mover_lane, self._ledger_lane, self._bells):
            lane.start()
        self._engine_lane.start()
        self._thread.start()
        self._heartbeat.start()
        self._watchdog.start()

    def ring(self, uid: str, attempt: int, done: Callable[[str], None]) -> None:
        """A bell came in. ``done(outcome)`` runs once, when the work it brought has left this node."""
        self._post(self._doorbells.rung(uid, attempt, done))

    @property
    def wants_bells(self) -> bool:
        """Whether this node has room for another piece of work."""
        return self._doorbells.wanted

    def drain(self, timeout_s: float) -> bool:
        """Finish or hand back what is here, then leave the registry. True when everything went in time."""
        self._post(on.DrainAsked())
        self._say(Drain(self._node.incarnation))
        in_time = self._wait_idle(timeout_s)
        if not in_time:
            self._post(on.HandBackAsked())
            in_time = self._wait_idle(self._last_words_s)
        self._watchdog.close()  # first: from here on what ends is meant to
        self._heartbeat.close()
        self._leave_registry(self._last_words_s if in_time else 0.0)
        return in_time

    def _leave_registry(self, within_s: float) -> None:
        """Refused while the ledger gives us what we do not hold (a call of ours was applied late): the comparison hands
        that back first. Left in our name, it would count as lost with its node."""
        until = time.monotonic() + within_s
        while self._say(Deregister(self._node.incarnation)) is NodeStatus.REFUSED and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)  # nothing tells when the ledger has let go

    def hand_back(self) -> None:
        """Let a drain that is under way take no more time. From any thread; returns at once."""
        self._post(on.HandBackAsked())

    def _say(self, command: Drain | Deregister) -> NodeStatus | None:
        """Tell the ledger something that others would find out by themselves, later. None: it did not answer."""
        try:
            answer = self._ledger.execute(command)
        except LedgerError as error:
            logger.warning("no answer to %s node=%s: %s", command.name, self._nodename, error)
            return None
        if answer.status is NodeStatus.REFUSED:
            logger.warning("%s refused node=%s: %s", command.name, self._nodename, answer.detail)
        return answer.status

    def close(self) -> None:
        """End every lane and give everything back."""
        self._emergency.close()
        self._watchdog.close()
        self._heartbeat.close()
        self._events.put(END)
        self._thread.join(timeout=5)
        self._engine_lane.close()
        for lane in (self._mover_lane, self._ledger_lane, self._bells):
            lane.close()
        self._link.close()
        self._transport.close()
        self._ledger.close()
        self._engine.close()

    # the node's thread

    def _post(self, event: on.Event) -> None:
        self._events.put(event)

    def _run(self) -> None:
        try:
            more = True
            while more:
                deadline = self._machine.next_deadline
                wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                events, more = take_all(self._events, wait_s)
                for event in events:
                    self._pulse.entered_at = time.monotonic()
                    self._perform(self._machine.receive(event, time.monotonic()))
                self._doorbells.seen(events)
                self._pulse.entered_at = time.monotonic()
                self._perform(self._machine.poll(time.monotonic()))
                self._show()
                self._pulse.entered_at = 0.0
        except BaseException as error:  # noqa: BLE001 - ends the process
            self._emergency.crashed("node", error)

    def _show(self) -> None:
        """What heartbeats tell and drain waits for."""
        counts = self._machine.gauges()
        was_idle, self._idle = self._idle, self._machine.idle
        self._gauges = Gauges(
            health=self._health(),
            blocks=self._machine.pool.counts(),
            running=counts["running"],
            waiting=counts["waiting"],
            refused=dict(self._machine.refusals),
            prefix_cache=dict(self._machine.cache_counts()),
        )
        self._doorbells.show(self._machine.wants_bells)
        if self._idle and not was_idle:
            self._machine.audit()  # finds a lost block at the first quiet moment
        with self._changed:
            self._changed.notify_all()

    def _health(self) -> Health:
        if not self._machine.draining:
            return Health.HEALTHY
        return Health.DRAINED if self._idle else Health.DRAINING

    def _vital_signs(self) -> Gauges:
        """What the next heartbeat tells."""
        unhealthy = {"health": Health.UNHEALTHY} if self._emergency.unhealthy else {}
        return self._gauges.model_copy(update=unhealthy)

    def _wait_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._gauges.health == Health.DRAINED, timeout_s)

    def _perform(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.Ask():
                    self._ledger_lane.put(effect)
                case do.Start() | do.Extend() | do.Stop():
                    self._engine_lane.put(effect)
                case do.Seal() | do.Check() | do.Pull():
                    self._mover_lane.put(effect)
                case do.Call():
                    self._call(effect)
                case do.ReplyTo():
                    self._link.reply(effect.call_id, effect.reply)
                case do.Ring():
                    self._bells.ring(effect.bell)
                case do.RingSelf():
                    self._bells.ring(Bell(self._role, "", 0))
                case do.BellDone():
                    self._doorbells.answer(effect.bell_id, effect.outcome)
                case do.Register():
                    self._heartbeat.register()
                case do.Log():
                    _log(effect, self._nodename)

    def _call(self, call: do.Call) -> None:
        def done(outcome: CallOutcome) -> None:
            detail = f"not sent: {outcome.detail}" if outcome.not_sent else outcome.detail
            self._post(on.CallEnded(call.tag, outcome.reply, detail))

        self._link.call(call.address, call.incarnation, call.message, call.timeout_s, done)

    # the other lanes

    def _between_steps(self, what: Callable[[], None]) -> None:
        """For the mover, which waits for the engine here: a step that never ends is not the mover's fault."""
        self._engine_lane.between_steps(what, self._mover_lane.entered)

    def _ask(self, questions: list[do.Ask]) -> None:
        """All questions that wait, in one round trip; each is answered, or not, for itself."""
        answers = self._ledger.execute_many([question.command for question in questions])
        for question, answer in zip(questions, answers, strict=True):
            if isinstance(answer, LedgerError):
                self._post(on.AskFailed(question.tag, str(answer)))
            else:
                self._post(on.Answered(question.tag, answer))

    def _move(self, jobs: list[do.Seal | do.Check | do.Pull]) -> None:
        for job in jobs:
            self._mover_lane.entered()
            self._moving = job.key
            self._post(self._mover.move(job))

    def _say_last_words(self, part: str, why: str) -> None:
        """Hand back what is here: ``part`` is dead or stuck, and the process is about to end."""
        moving = self._moving if part == self._mover_lane.name else None
        for bell in say_last_words(self._ledger, self._node.incarnation, self._vital_signs(), why, moving):
            self._bells.ring(bell)
        self._bells.close(_LAST_BELLS_S)

    def _after_beat(self) -> None:
        self._link.version = self._heartbeat.version
        self._transport.forget_gone()

    def _registered(self) -> None:
        self._link.version = self._heartbeat.version
        self._post(on.Registered())


def _log(effect: do.Log, nodename: str) -> None:
    fields: dict[str, Any] = {"node": nodename, "uid": effect.uid, **effect.fields}
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
    logger.log(logging.getLevelName(effect.level.upper()), "%s %s", effect.event, text)
