"""What the ledger says of one request, moment by moment: when its fate was decided."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from itertools import pairwise

from redis import Redis

PREFIX = "baton:{0}:"
ENDED = frozenset({"FINISHED", "FAILED", "ABORTED", "EXPIRED"})
_LOOK_EVERY_S = 0.01
"""How exact the measured times are."""


@dataclass(frozen=True)
class Moment:
    """A request's record as it was from ``at`` on."""

    at: float
    state: str
    attempt: int
    owner: str
    length: int

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True)
class Fate:
    """When it was decided what becomes of a request."""

    decided_at: float
    """The attempt was ended; or, when it simply went on, its next step was seen."""
    silence_s: float
    """Of one that simply went on: the longest time without a step."""
    attempts: int
    """How many more it took."""


def uid_of(redis: Redis, request_id: str) -> str:
    return str(redis.get(f"{PREFIX}latest:{request_id}"))


class Watch:
    """Follows one record from now on, until ``close``."""

    def __init__(self, redis: Redis, uid: str) -> None:
        self._redis = redis
        self._uid = uid
        self.moments: list[Moment] = [self._look()]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def fate(self, fault_at: float) -> Fate:
        """What came of the request, once it has ended."""
        first, *later = self.moments
        requeued = next((moment for moment in later if moment.attempt > first.attempt), None)
        if first.ended or (requeued is None and not later):
            return Fate(fault_at, 0.0, 0)
        decided = requeued or later[0]
        times = [fault_at, *(moment.at for moment in later)]
        silence_s = max(after - before for before, after in pairwise(times)) if requeued is None else 0.0
        return Fate(decided.at, silence_s, self.moments[-1].attempt - first.attempt)

    def _look(self) -> Moment:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hmget(f"{PREFIX}rec:{self._uid}", "state", "attempt", "owner")
        pipeline.llen(f"{PREFIX}tok:{self._uid}")
        (state, attempt, owner), length = pipeline.execute()
        return Moment(time.monotonic(), state, int(attempt), owner or "", length)

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_EVERY_S):
            moment = self._look()
            last = self.moments[-1]
            if replace(moment, at=last.at) != last:
                self.moments.append(moment)
