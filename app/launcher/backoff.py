"""How long to wait before a child that ended is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackoffPolicy:
    """The first restart is nearly immediate, for a single crash; a crash loop must not eat the machine."""

    first_s: float = 0.5
    longest_s: float = 30.0
    healthy_after_s: float = 60.0
    """A child that ran for so long has recovered: its next end counts as the first."""


class Backoff:
    """The restart delays of one child: first, doubled each time, at most longest; reset by a long enough run."""

    def __init__(self, policy: BackoffPolicy) -> None:
        self._policy = policy
        self._next_s = policy.first_s

    def delay_after(self, ran_for_s: float) -> float:
        """Seconds to wait before the next start, now that the child has ended after ``ran_for_s``."""
        if ran_for_s >= self._policy.healthy_after_s:
            self._next_s = self._policy.first_s
        delay_s = min(self._next_s, self._policy.longest_s)
        self._next_s = min(self._next_s * 2, self._policy.longest_s)
        return delay_s
