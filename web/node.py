"""This web process as a node of the ledger: its heartbeats, its event stream, and what must still be said for it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable

from app.bells import BellLane
from app.errors import LedgerError, ServiceUnavailable
from app.heartbeat import HeartbeatThread
from app.ledger.api import Ledger
from app.protocol.commands import Abort, AbortAnswer, AbortStatus, Answer, Detach
from app.schemas import Gauges, NodeInfo
from app.settings import Settings
from web.events import EventReader, Mailboxes
from web.logs import log_event

_FAREWELLS_PER_BEAT = 500


class WebNode:
    """Owns the threads of one web process: heartbeat, event reader, and the bells that both it and answers ring."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        bells: BellLane,
        incarnation: str,
        model: str,
        on_crash: Callable[[str, BaseException], None],
    ) -> None:
        """``model``: fingerprint of the model whose tokenizer is used here. ``on_crash`` hears of a dead thread."""
        self.incarnation = incarnation
        self.mailboxes = Mailboxes()
        self._settings = settings
        self._ledger = ledger
        self._bells = bells
        self._reader = EventReader(ledger, incarnation, self.mailboxes, on_crash)
        self._farewells: deque[tuple[Abort | Detach, int]] = deque()
        node = NodeInfo(
            incarnation=incarnation,
            role="web",
            name=f"web-{incarnation[:8]}",
            pid=os.getpid(),
            host=socket.gethostname(),
            model=model,
        )
        self._heartbeat = HeartbeatThread(
            settings,
            ledger,
            node,
            lambda: Gauges(running=len(self.mailboxes)),
            ring=bells.ring,
            on_crash=on_crash,
            on_registered=self._ledger_changed,
            on_ledger_restarted=self._ledger_changed,
            after_beat=self._repeat_farewells,
        )

    def start(self) -> None:
        """Start the threads. A ledger that is away is waited for, so that web can say so itself."""
        self._bells.start()
        self._heartbeat.start()
        self._reader.start()

    def stop(self) -> None:
        """End the threads; the node stays registered until its exit is reported or its heartbeat is too old."""
        self._reader.stop()
        self._heartbeat.close()
        self._bells.close()
        self._reader.join()

    def demand_registered(self) -> None:
        """Raises ServiceUnavailable while the ledger does not know this node: it could not watch a request."""
        if not self._heartbeat.registered:
            raise ServiceUnavailable(f"{self._not_registered()}; try again", retry_after_s=1)

    def demand_version(self, version: int) -> None:
        """Raises ServiceUnavailable while a node may run that cannot compute a request of ``version``."""
        if self._heartbeat.version < version:
            raise ServiceUnavailable(
                "this request has options that nodes of the release before do not know, and one still runs; try again "
                "when the upgrade is over",
                retry_after_s=5,
            )

    def wait_registered(self, timeout_s: float) -> bool:
        return self._heartbeat.wait_registered(timeout_s)

    def faults(self) -> list[str]:
        """What is wrong with this process, for ``/health``: a dead thread here would mean silent answers."""
        threads = {"heartbeat": self._heartbeat.alive, "event-reader": self._reader.is_alive()}
        threads[self._bells.name] = self._bells.alive
        return [f"thread {name} is dead" for name, alive in threads.items() if not alive]

    def ledger_faults(self) -> list[str]:
        """Why the ledger cannot be relied on now, for ``/ready``."""
        if not self._heartbeat.registered:
            return [self._not_registered()]
        silent_s = time.monotonic() - self._heartbeat.answered_at
        allowed_s = 2 * self._settings.heartbeat_s + self._settings.ledger_timeout_s
        if silent_s <= allowed_s:
            return []
        return [f"the ledger has taken no write for {silent_s:.1f} s: {self._heartbeat.trouble}"]

    def say_farewell(self, command: Abort | Detach, until_ms: int = -1) -> None:
        """Tell the ledger that nobody waits any more; repeated until it answers (both commands are idempotent).

        ``until_ms``: it must be heard after this ledger time, up to which it may still be undone by an ``Attach`` whose
        outcome is unknown.
        """
        if not self._say(command, until_ms):
            log_event(logging.WARNING, "farewell_kept", uid=command.uid, command=command.name)

    def _say(self, command: Abort | Detach, until_ms: int) -> bool:
        try:
            said = _heard(self._ledger.execute(command), until_ms)
        except LedgerError:
            said = False
        if not said:
            self._farewells.append((command, until_ms))
        return said

    def _not_registered(self) -> str:
        refusal = self._heartbeat.refusal
        return "this web process is not registered with the ledger" + (f": {refusal}" if refusal else "")

    def _ledger_changed(self) -> None:
        """Watchers, events or tokens may be gone: every open answer compares itself with its record."""
        self._reader.start_over()
        self.mailboxes.wake_all()

    def _repeat_farewells(self) -> None:
        """Once each, and all in one round trip: heartbeats wait for it."""
        waiting = [self._farewells.popleft() for _ in range(min(len(self._farewells), _FAREWELLS_PER_BEAT))]
        answers = self._ledger.execute_many([command for command, _ in waiting])
        for (command, until_ms), answer in zip(waiting, answers, strict=True):
            if isinstance(answer, LedgerError) or not _heard(answer, until_ms):
                self._farewells.append((command, until_ms))


def _heard(answer: Answer, until_ms: int) -> bool:
    return isinstance(answer, AbortAnswer) and answer.status is not AbortStatus.LATE and answer.time_ms > until_ms
