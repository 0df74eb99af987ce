"""The machine: every rule on four small clusters."""

from __future__ import annotations

from collections import Counter

from hypothesis import seed

from tests.model.carrier_rules import CarrierRules
from tests.model.client_rules import ClientRules
from tests.model.handoff_rules import HandoffRules
from tests.model.process_rules import ProcessRules


class Protocol(ClientRules, HandoffRules, CarrierRules, ProcessRules):
    """Checked after every rule, with whatever is on its way, half done, or down."""


@seed(1)
class OneOfEach(Protocol):
    PREFILL_NODES, DECODE_NODES, tally = 1, 1, Counter()


@seed(2)
class TwoDecodeNodes(Protocol):
    PREFILL_NODES, DECODE_NODES, tally = 1, 2, Counter()


@seed(3)
class TwoPrefillNodes(Protocol):
    PREFILL_NODES, DECODE_NODES, tally = 2, 1, Counter()


@seed(4)
class TwoOfEach(Protocol):
    PREFILL_NODES, DECODE_NODES, tally = 2, 2, Counter()


MACHINES = (OneOfEach, TwoDecodeNodes, TwoPrefillNodes, TwoOfEach)
