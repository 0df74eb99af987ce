"""The cluster's timeouts, and the bound within which it must be back at its baseline."""

from __future__ import annotations

from dataclasses import dataclass

SCAN_OVERDUE_S = 2.0
"""A node scans when nobody has for so long."""
CALL_TTL_S = 5.0
"""``not_after`` of a ledger call lies so far behind the ledger time that its caller saw last."""
RING_AGAIN_MOST_S = 8.0
"""Longest pause between two bells for a request that waits."""
LAST_WORDS_S = 2.0
"""What a node may still say once it is to end."""
MOST_BLOCKS = 24
"""Of one node."""
ASK_AGAIN_MOST_S = 1.0
"""Longest pause before a ledger question without an answer is asked again."""


@dataclass(frozen=True, slots=True)
class Times:
    """As in ``app.settings``, with the long ones cut to what a short run can see the end of."""

    heartbeat_s: float = 0.5
    node_ttl_s: float = 5.0
    link_timeout_s: float = 2.0
    ledger_timeout_s: float = 2.0
    check_s: float = 1.0
    scan_s: float = 1.0
    engine_stall_s: float = 4.0
    grant_timeout_s: float = 4.0
    drain_timeout_s: float = 4.0
    queue_timeout_s: float = 300.0
    first_token_timeout_s: float = 300.0
    pull_min_blocks_per_s: float = 5.0
    idempotency_grace_s: float = 3.0
    restart_most_s: float = 2.0

    @property
    def pull_most_s(self) -> float:
        """From COMMIT to the end of the longest wait for its result."""
        return 2 * self.link_timeout_s + MOST_BLOCKS / self.pull_min_blocks_per_s

    @property
    def decided_s(self) -> float:
        """So long after a process died, at the latest, somebody has taken what it held (promise 2): its silence is
        as old as it may be, and every node scans when nobody else has."""
        return self.node_ttl_s + SCAN_OVERDUE_S + SCAN_OVERDUE_S / 2 + self.heartbeat_s + self.ledger_timeout_s

    @property
    def baseline_s(self) -> float:
        """Within so long after the last fault, and the time that the work itself takes, all is answered and free.

        A part that got stuck last is noticed and ends its process; the ledger learns of that by the silence only;
        the next attempt meets one more leftover (a call that is applied late and handed back, or a peer that does
        not know of it) and runs into the longest deadline of a handoff; its bell is lost and rung again.
        """
        noticed = self.engine_stall_s + self.heartbeat_s + LAST_WORDS_S
        leftover = CALL_TTL_S + self.ledger_timeout_s + ASK_AGAIN_MOST_S + self.check_s
        handoff = self.link_timeout_s + self.pull_most_s
        return noticed + self.decided_s + leftover + handoff + RING_AGAIN_MOST_S
