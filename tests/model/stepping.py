"""Rules and invariants that count themselves and explain themselves, and the machine that has none yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

from hypothesis import currently_in_test_context, event, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.model.calm import come_to_rest, repair, send_canary
from tests.model.carriage import Carriage
from tests.model.cluster import Cluster
from tests.model.mishaps import FOR_EVER, Mishaps
from tests.model.parcels import MOMENTS
from tests.model.promises import PROMISES
from tests.model.wishes import ORDERS, SETTINGS, Order, Setting
from tests.sim.invariants import Violation
from tests.sim.trace import lines

_MOST_LINES = 300
_NOW = "now"
BEFORE = st.sampled_from((_NOW, *MOMENTS))
"""When a fault strikes: now, or right before the next claim, grant, pull, … if that comes up soon."""
LASTS = st.sampled_from((0.3, 0.01, 1.0, 2.5, 7.0, FOR_EVER))


class Stepping(RuleBasedStateMachine):
    """A cluster to begin with, and its end: when the last rule has struck, all comes to rest and a canary works."""

    PREFILL_NODES: ClassVar[int]
    DECODE_NODES: ClassVar[int]
    tally: ClassVar[Counter[str]]
    """What happened in all runs of this machine: how often each rule acted, what was hit, what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self._build(Setting(), 1, 1)
        self._broken = False

    @initialize(setting=SETTINGS, orders=st.lists(ORDERS, min_size=1, max_size=4))
    def begin(self, setting: Setting, orders: list[Order]) -> None:
        """A cluster, and some requests that are on their way to it."""
        self._build(setting, self.PREFILL_NODES, self.DECODE_NODES)
        for web, order in enumerate(orders):
            self.cluster.submit(order, web)

    def _build(self, setting: Setting, prefill_nodes: int, decode_nodes: int) -> None:
        self.cluster = Cluster(setting, prefill_nodes, decode_nodes)
        self.carriage = Carriage(self.cluster)
        self.mishaps = Mishaps(self.cluster)

    def wait_until(self, before: str) -> None:
        if before != _NOW:
            self.cluster.come_up(MOMENTS[before])

    def count(self, what: str) -> None:
        self.tally[what] += 1

    def teardown(self) -> None:
        self.count("runs")
        if self._broken:
            return
        with self.explained():
            repair(self.cluster, self.mishaps)
            took_s = come_to_rest(self.cluster)
            send_canary(self.cluster)
            self.check_promises()
        world = self.cluster.world
        event(f"at rest after {4 * (took_s // 4):.0f} s")
        for what, count in (*world.outcomes.items(), *world.counts.items()):
            self.tally[what] += count
        self.tally["requests that were tried again"] += sum(
            record.attempt > 1 for record in world.ledger.store.records.values()
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Print what happened to the request that a violation is about; hypothesis shows it with the last example."""
        try:
            yield
        except Exception as error:
            self._broken = True
            if currently_in_test_context():
                note(self._trace(error.uid if isinstance(error, Violation) else ""))
                note(f"--- {type(error).__name__}: {error}")
            raise

    def _trace(self, uid: str) -> str:
        """Of this request; or, where it is about none, of the oldest that has not ended; or of all."""
        uid = uid or next(iter(self.cluster.in_process()), "")
        trace = list(lines(self.cluster.world.notes, uid))[-_MOST_LINES:]
        return "\n".join((f"--- trace of {uid or 'all'}, the last {len(trace)} lines", *trace))

    @invariant()
    def promises_hold(self) -> None:
        with self.explained():
            self.check_promises()

    def check_promises(self) -> None:
        for promise in PROMISES:
            for what, uid in promise(self.cluster):
                raise self.cluster.world.violation(f"{promise.__name__}: {what}", uid)


def step(**drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., bool | None]], Callable[..., None]]:
    """A rule. Counted each time it acts, that is, unless it answers False."""

    def accept(act: Callable[..., bool | None]) -> Callable[..., None]:
        @wraps(act)
        def acting(self: Stepping, **chosen: Any) -> None:
            with self.explained():
                if act(self, **chosen) is not False:
                    self.count(f"rule {act.__name__}")

        made: Callable[..., None] = rule(**drawn)(acting)  # type: ignore[call-overload]
        return made

    return accept


def fault(**drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., bool | None]], Callable[..., None]]:
    """A rule that strikes at one of the moments in ``BEFORE``."""

    def accept(strike: Callable[..., bool | None]) -> Callable[..., None]:
        @wraps(strike)
        def striking(self: Stepping, before: str, **chosen: Any) -> bool | None:
            self.wait_until(before)
            return strike(self, **chosen)

        return step(before=BEFORE, **drawn)(striking)

    return accept
