"""A cluster whose limits are met soon, and whose parts can be broken."""

from __future__ import annotations

from pathlib import Path

from tests.integration.baton import Baton

STALL_S = 3.0
"""A step of STEP_TOKENS takes a twentieth of a second."""
STEP_TOKENS = 8
NUM_BLOCKS = 64
"""A prompt of 600 tokens and its answer, and not another one beside it."""


class Small:
    """One prefill and one decode worker with little room, small steps and a short patience, which can be broken."""

    def __init__(self, baton: Baton, orders: Path) -> None:
        self.baton = baton
        self._orders = orders

    def sabotage(self, worker: str, how: str) -> None:
        """See ``sabotage/sitecustomize.py``; done when the worker has taken it in."""
        order = self._orders / f"{worker}.{how}"
        order.touch()
        self.baton.wait_for(lambda: not order.exists(), 5)

    def blocks_in_use(self) -> int:
        """Blocks that somebody holds, on all nodes."""
        nodes = self.baton.get("/cluster")[1]["nodes"]
        return sum(node["blocks"]["total"] - node["blocks"]["free"] - node["blocks"]["cached"] for node in nodes)

    def wait_for_baseline(self, within_s: float = 10) -> None:
        """Until nothing is held anywhere."""
        self.baton.wait_for(lambda: self.blocks_in_use() == 0 and not self.baton.get("/cluster")[1]["leases"], within_s)
