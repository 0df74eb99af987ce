"""The matrix: each step of a request, on each node that passes it, times each fault."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.schemas import Role
from workers.failpoints.orders import Point


class Fault(StrEnum):
    KILL = "kill"
    """kill -9; its supervisor sees the exit."""
    CRASH = "crash"
    """kill -9 with nobody there to see it."""
    FREEZE = "freeze"
    """SIGSTOP."""
    CUT = "cut"
    """Messages to and from other nodes are lost."""


BOUND_S = {Fault.KILL: 1.0, Fault.CRASH: 6.0, Fault.FREEZE: 10.0, Fault.CUT: 10.0}
"""Until the fate of a request is decided: promise 2 of the design."""

STEPS: tuple[tuple[Point, Role], ...] = (
    (Point.BEFORE_CLAIM, "prefill"),
    (Point.AFTER_CLAIM, "prefill"),
    (Point.AFTER_RESERVE, "decode"),
    (Point.AFTER_GRANT, "prefill"),
    (Point.AFTER_GRANT, "decode"),
    (Point.HALF_PREFILLED, "prefill"),
    (Point.AFTER_FIRST_TOKEN, "prefill"),
    (Point.AFTER_COMMIT, "prefill"),
    (Point.AFTER_COMMIT, "decode"),
    (Point.DURING_PULL, "decode"),
    (Point.AFTER_ACTIVATE, "decode"),
    (Point.MID_DECODE, "decode"),
    (Point.LAST_TOKEN, "decode"),
    (Point.AFTER_LAST_TOKEN, "decode"),
)


@dataclass(frozen=True)
class Cell:
    """One fault at one step."""

    fault: Fault
    point: Point
    role: Role

    def __str__(self) -> str:
        return f"{self.fault}-{self.point}-{self.role}"


CELLS = tuple(Cell(fault, point, role) for fault in Fault for point, role in STEPS)

SHORT = frozenset(
    {
        Cell(Fault.KILL, Point.HALF_PREFILLED, "prefill"),
        Cell(Fault.CRASH, Point.AFTER_ACTIVATE, "decode"),
        Cell(Fault.FREEZE, Point.MID_DECODE, "decode"),
        Cell(Fault.CUT, Point.AFTER_GRANT, "decode"),
        Cell(Fault.CUT, Point.AFTER_FIRST_TOKEN, "prefill"),
    }
)
"""Every fault, before and after the handoff, in a few minutes. In the middle of a pull, and decode nodes killed in
mid-decode: see the tests of peers that die, and ``test_streams``."""
