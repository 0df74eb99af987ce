"""The checker's own idea of a request: what the ledger must believe of it, and which steps it may take."""

from __future__ import annotations

from dataclasses import dataclass, field

ENDS = {"FINISHED", "FAILED", "ABORTED", "EXPIRED"}
NEXT = {
    "QUEUED": {"PREFILLING", "FAILED", "ABORTED", "EXPIRED"},
    "PREFILLING": {"QUEUED", "DECODING", *ENDS},
    "DECODING": {"QUEUED", *ENDS},
}
"""State → states that may follow."""


class Violation(Exception):
    """Something happened that the product promises never happens. ``uid``: of which request, if of one."""

    def __init__(self, what: str, uid: str = "") -> None:
        super().__init__(what)
        self.uid = uid


@dataclass(slots=True)
class Shadow:
    """What the ledger must believe of one request."""

    uid: str
    state: str = "QUEUED"
    attempt: int = 1
    failures: int = 0
    fence: str = ""
    owner: str = ""
    lease: str = ""
    lease_node: str = ""
    tokens: list[int] = field(default_factory=list)
    group: str = ""
    """uid of the first sequence of its request."""

    @property
    def computing(self) -> bool:
        return self.state in ("PREFILLING", "DECODING")

    @property
    def holders(self) -> tuple[str, ...]:
        """Incarnations that must go on living for this attempt."""
        return tuple(one for one in (self.owner, self.lease_node) if one) if self.computing else ()
