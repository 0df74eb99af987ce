"""Random faults, one every few seconds, and how long the requests that they met took to go on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from tests.chaos.cells import STEPS
from tests.chaos.records import PREFIX, Watch
from tests.chaos.stack import Stack
from workers.failpoints.orders import Action, Order, Point

PAUSE_S = (2.0, 6.0)
FROZEN_S = (0.5, 12.0)
"""From a hiccup to twice what makes a node a dead one."""
CUT_S = (1.0, 8.0)
UNSEEN_S = 8.0
"""A supervisor that looks away for so long: the node's silence is noticed first."""
TAKEN_S = 5.0
FOLLOWED_S = 120.0
KV_ROLES = ("prefill", "decode")
WRONG_BYTES = (Action.CORRUPT, Action.SWAPPED, Action.SHORT, Action.FOREIGN)


class Injector:
    """Hurts one node after the other; no fault begins before the last one is undone."""

    def __init__(self, stack: Stack, chance: random.Random) -> None:
        self._stack = stack
        self._random = chance
        self._kinds: list[tuple[str, int, Callable[[str, int], None]]] = [
            ("kill", 3, self._kill),
            ("crash", 1, self._crash),
            ("freeze", 3, self._freeze),
            ("cut", 2, self._cut),
        ]
        self._followers: list[threading.Thread] = []
        self.faults: Counter[str] = Counter()
        self.recoveries: list[float] = []
        """Seconds from a fault until a request that was with the node had its next token or its end."""

    def run_until(self, end: float) -> None:
        while (left_s := end - time.monotonic()) > 0:
            time.sleep(min(left_s, self._random.uniform(*PAUSE_S)))
            if self._random.random() < 0.2:
                self._hand_over_wrong_bytes()
            else:
                self._hurt_somebody()
        self._stack.lift()
        for follower in self._followers:
            follower.join()

    def _hurt_somebody(self) -> None:
        """A fault at a random moment, or exactly at a random step of whatever request comes by."""
        names, weights, deeds = zip(*self._kinds, strict=True)
        index = self._random.choices(range(len(names)), weights)[0]
        expendable = self._expendable()
        at_step = self._random.random() < 0.5
        step, role = self._random.choice(STEPS)
        if not expendable or (at_step and not any(name.startswith(role) for name in expendable)):
            return
        if at_step:
            pid = self._taken(Order(point=step, role=role, action=Action.STOP))
            if pid is None:
                return
        else:
            pid = expendable[self._random.choice(sorted(expendable))]
        self._deal(names[index], deeds[index], pid, f"at {step}" if at_step else "at a random moment")

    def _deal(self, kind: str, deed: Callable[[str, int], None], pid: int, where: str) -> None:
        incarnation = next((inc for inc, its in self._pids().items() if its == pid), "")
        self.faults[kind] += 1
        print(f"{time.strftime('%H:%M:%S')} {kind} {pid} {where}", flush=True)
        self._follow(incarnation)
        deed(incarnation, pid)

    def _hand_over_wrong_bytes(self) -> None:
        action = self._random.choice(WRONG_BYTES)
        if self._taken(Order(point=Point.SEALED, role="prefill", action=action)) is not None:
            self.faults[action] += 1
            print(f"{time.strftime('%H:%M:%S')} {action}", flush=True)
        self._stack.lift()

    def _taken(self, order: Order) -> int | None:
        """The process that has taken the order; None if nobody came by in time, nor will any more."""
        self._stack.arm(order)
        try:
            return self._stack.wait_taken(order.action, TAKEN_S)
        except AssertionError:
            if self._stack.disarm():
                return None
            return self._stack.wait_taken(order.action, TAKEN_S)

    def _kill(self, _: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _crash(self, _: str, pid: int) -> None:
        with self._stack.nobody_sees_exits():
            os.kill(pid, signal.SIGKILL)
            time.sleep(UNSEEN_S)

    def _freeze(self, _: str, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._random.uniform(*FROZEN_S))
        os.kill(pid, signal.SIGCONT)

    def _cut(self, _: str, pid: int) -> None:
        cut = self._stack.orders / f"{Action.CUT}-{pid}"
        cut.touch()
        os.kill(pid, signal.SIGCONT)  # where it was stopped at a step
        time.sleep(self._random.uniform(*CUT_S))
        cut.unlink()

    def _expendable(self) -> dict[str, int]:
        """Workers, by name, that have a healthy neighbour of their role."""
        healthy = {name: node["pid"] for name, node in self._stack.baton.nodes().items()}
        roles = Counter(name[:-1] for name in healthy)
        return {
            name: pid for name, pid in healthy.items() if name[:-1] in ("prefill", "decode") and roles[name[:-1]] > 1
        }

    def _pids(self) -> dict[str, int]:
        return {node["incarnation"]: node["pid"] for node in self._stack.baton.get("/cluster")[1]["nodes"]}

    def _follow(self, incarnation: str) -> None:
        """Measure, for each request that this node owns or has leased, when it goes on."""
        redis = self._stack.redis
        began_at = time.monotonic()
        for member in redis.zrange(f"{PREFIX}owned:{incarnation}", 0, -1):
            kind, name = str(member).split(":", 1)
            uid = name if kind == "c" else redis.hget(f"{PREFIX}lease:{name}", "uid")
            if uid and kind in "cl":
                follower = threading.Thread(target=self._time, args=(str(uid), began_at))
                follower.start()
                self._followers.append(follower)

    def _time(self, uid: str, began_at: float) -> None:
        with ExitStack() as stack:
            watch = Watch(self._stack.redis, uid)
            stack.callback(watch.close)
            first = watch.moments[0]
            if first.ended:
                return
            deadline = began_at + FOLLOWED_S
            while time.monotonic() < deadline:
                moment = next((m for m in watch.moments if m.length > first.length or m.ended), None)
                if moment is not None:
                    self.recoveries.append(moment.at - began_at)
                    return
                time.sleep(0.01)
        self.recoveries.append(FOLLOWED_S)
