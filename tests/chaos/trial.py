"""One request that comes to a step at which something happens, the requests around it, and what is true afterwards."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress

import psutil

from app.schemas import Role
from tests.chaos.clients import GREEDY, Expected, Stream, greedy
from tests.chaos.records import Watch, uid_of
from tests.chaos.stack import Stack
from tests.chaos.table import ROWS, Row
from tests.waiting import wait_for
from workers.failpoints.orders import Action, Order, Point

VICTIM = GREEDY[6]
"""34 tokens of prompt: three blocks, two chunks."""
TOKENS = 16
REACHED_S = 60.0
SERVICE_S = 60.0
"""Normal service of what is decided, on a machine that others use too."""
SILENCE_S = 10.0
"""The longest of the bounds: nothing may stand still for longer without being failed or resumed."""


class Trial:
    """Enter it, hurt ``pid``, leave it: on the way out everything that was frozen or cut goes on again.

    Then ``check`` what came of it.
    """

    def __init__(self, stack: Stack, point: Point, role: Role, action: Action) -> None:
        self.stack = stack
        self.request_id = stack.name("victim")
        self.undo = ExitStack()
        """What ends the fault, once every request has ended."""
        self._point = point
        self._role: Role = role
        self._action = action
        self._others: list[tuple[Stream, Expected]] = []

    def __enter__(self) -> Trial:
        with ExitStack() as begun:  # what was begun ends, too, if the step is never reached
            begun.callback(self.undo.close)
            self._begin()
            begun.pop_all()
        return self

    def _begin(self) -> None:
        any_request = self._point is Point.BEFORE_CLAIM
        request_id = "" if any_request else self.request_id
        self._others = self.stack.canaries()
        self.stack.arm(Order(point=self._point, role=self._role, action=self._action, request_id=request_id))
        if self._role == "prefill" and not any_request:
            self._others += self.stack.twins()
        uncached = {"cache_salt": self.request_id}  # it comes to every step
        self._victim = Stream(self.stack.baton, self.request_id, greedy(6, TOKENS) | uncached).start()
        self.pid = self.stack.wait_taken(self._action, REACHED_S)
        if self._action is Action.STOP:
            self.undo.callback(self.go_on)
        self._watch = Watch(self.stack.redis, uid_of(self.stack.redis, self.request_id))
        self.undo.callback(self._watch.close)

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def go_on(self) -> None:
        """Let the process that stands at the step go on, if it still does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def wait_ended(self) -> None:
        """Every request has an end, and it comes in time."""
        for stream in (self._victim, *(other for other, _ in self._others)):
            assert stream.ended.wait(SILENCE_S + SERVICE_S), f"{stream.request_id} hangs: {self._watch.moments}"

    def check(self, fault: str, fault_at: float, bound_s: float, noticeable_at: float = 0.0) -> None:
        """Decided within ``bound_s`` of the moment at which it could be noticed, exact, its neighbours too; 20 more
        requests are served, and nothing is left over."""
        victim, fate = self._victim, self._watch.fate(fault_at)
        decided_ms = round(1000 * (fate.decided_at - fault_at))
        next_ms = round(1000 * victim.time_to_next(fate.decided_at))
        outcome = "exact" if victim.exact else victim.error
        ROWS.append(Row(fault, self._point, self._role, decided_ms, next_ms, fate.attempts, outcome))
        assert fate.decided_at - max(fault_at, noticeable_at) <= bound_s, self._watch.moments
        assert fate.silence_s <= SILENCE_S, self._watch.moments
        assert victim.exact, victim.error
        assert victim.token_ids == VICTIM["output_ids"][:TOKENS]
        assert str(VICTIM["text"]).startswith(victim.text)
        for other, expected in self._others:
            assert other.exact, other.error
            assert other.answer() == expected
        self.stack.serve_more()
        self.stack.wait_baseline()


def ended_at(pid: int) -> float:
    """When the kernel says that a killed process has ended: only then can its supervisor see it. On a busy machine it
    takes its time to free a gigabyte."""
    wait_for(lambda: has_ended(pid), 10, f"{pid} does not end")
    return time.monotonic()


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
