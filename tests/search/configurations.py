"""The configurations that are searched."""

from __future__ import annotations

from tests.search.configuration import Configuration, Fault, Request

_FIRST, _SECOND = (11, 12), (21, 22)
_ALL = frozenset(Fault)

TWO_FAULTS = Configuration("two-faults", (Request("u1", _FIRST),), faults=2, kinds=_ALL - {Fault.FREEZE})
ABORTED_AND_AGAIN = Configuration(
    "aborted-and-again",
    (Request("u1", _FIRST, may_be_aborted=True), Request("u2", _SECOND, after="u1")),
    faults=1,
    kinds=_ALL - {Fault.FREEZE},
)
FROZEN = Configuration("frozen", (Request("u1", _FIRST),), faults=1, kinds=frozenset({Fault.FREEZE}))
DRAINED = Configuration("drained", (Request("u1", _FIRST),), faults=1, drains=1, kinds=_ALL - {Fault.FREEZE})
TWO_OF_EACH = Configuration(
    "two-requests-two-decode-nodes",
    (Request("u1", _FIRST, client_id="one"), Request("u2", _SECOND, client_id="two")),
    decode=2,
    faults=1,
)
