"""What the ledger's twin does, by number: each command in each situation is worked out once, and checked."""

from __future__ import annotations

import marshal
from typing import Any, NamedTuple

from app.ledger.memory import MemoryLedger
from app.ledger.memory.state import Store
from app.protocol.commands import Bell, Event, Heartbeat, NodeStatus, Register, Scan, ScanAnswer
from app.schemas import Gauges, NodeInfo
from tests.search.configuration import NEVER_MS, Configuration
from tests.search.images import load, save
from tests.search.ledger_checks import LedgerChecks, see
from tests.search.ledger_form import NOW_MS, Garbage, drop, form_of, garbage_of, normalise
from tests.search.renaming import Renaming
from tests.search.values import NAMES, VALUES
from tests.search.violation import Violation

WEB = "w"
"""Incarnation of the one web process, which outlives everything."""


class Applied(NamedTuple):
    """The next situation, the value of the answer, and bells to ring."""

    ledger: int
    answer: int
    bells: tuple[Bell, ...]


class Passed(NamedTuple):
    """Time has passed: the next situation, who is not known any more, and bells to ring."""

    ledger: int
    lost: tuple[bool, ...]
    bells: tuple[Bell, ...]


class Facts(NamedTuple):
    """What others see of a situation."""

    mask: int
    """The names that it mentions."""
    garbage: tuple[tuple[Garbage, int], ...]
    """Each with the bit of its name."""
    in_process: frozenset[str]
    at_rest_with: frozenset[str] | None
    """Nothing is in process, waiting, leased or owned, and exactly these nodes are registered and alive."""


class LedgerSteps:
    """Situations of the ledger by number."""

    def __init__(self, configuration: Configuration) -> None:
        self._checks = LedgerChecks(configuration)
        self._one_decode_node = configuration.decode == 1
        self._numbers: dict[bytes, int] = {}
        self._images: list[bytes] = []
        self.facts: list[Facts] = []
        self._applied: dict[tuple[int, int, bool], Applied] = {}
        self._passed: dict[tuple[int, int, tuple[str, ...]], Passed] = {}
        self._dropped: dict[tuple[int, tuple[Garbage, ...]], int] = {}

    def empty(self) -> int:
        """A new ledger that knows the web process."""
        twin = _twin(Store(wall=NOW_MS))
        twin.execute(Register(NodeInfo(incarnation=WEB, role="web", name=WEB, pid=1, host="h"), NEVER_MS))
        return self._number(twin.store)

    def apply(self, ledger: int, command: int, late: bool) -> Applied:
        """Apply a command, by its value; ``late``: after its ``not_after``."""
        key = (ledger, command, late)
        applied = self._applied.get(key)
        if applied is None:
            applied = self._applied[key] = self._work_out(ledger, VALUES[command], late)
        return applied

    def pass_time(self, ledger: int, ms: int, beating: tuple[str, ...]) -> Passed:
        """Let time pass; then these incarnations beat, and a scan runs."""
        key = (ledger, ms, beating)
        passed = self._passed.get(key)
        if passed is None:
            passed = self._passed[key] = self._work_out_time(ledger, ms, beating)
        return passed

    def drop(self, ledger: int, garbage: tuple[Garbage, ...]) -> int:
        """The situation without what nobody can ask for any more."""
        key = (ledger, garbage)
        number = self._dropped.get(key)
        if number is None:
            store = self.copy_of(ledger)
            drop(store, garbage)
            number = self._dropped[key] = self._number(store)
        return number

    def rename(self, ledger: int, renaming: Renaming) -> int:
        """The situation with other names."""
        return self._number(renaming.mutable(self.copy_of(ledger)))

    def copy_of(self, ledger: int) -> Store:
        """The data in this situation, to look at."""
        store: Store = load(self._images[ledger])
        return store

    def __len__(self) -> int:
        return len(self._images)

    def _work_out(self, ledger: int, command: Any, late: bool) -> Applied:
        twin = _twin(self.copy_of(ledger))
        before = see(twin.store)
        answer = _apply(twin, command, NOW_MS - 1 if late else NOW_MS)
        self._checks.check(before, command, answer, twin.store, _events(twin.store))
        bells = answer.bells if isinstance(answer, ScanAnswer) else ()
        return Applied(self._number(twin.store), VALUES.number(answer), bells)

    def _work_out_time(self, ledger: int, ms: int, beating: tuple[str, ...]) -> Passed:
        store = self.copy_of(ledger)
        wall = store.wall + ms
        twin = _twin(store, wall)
        before = see(store)
        beats = [_apply(twin, Heartbeat(incarnation, Gauges()), wall) for incarnation in beating]
        scan = _apply(twin, Scan(min_age_ms=0), wall)
        self._checks.check(before, None, scan, store, _events(store))
        lost = tuple(beat.status is NodeStatus.UNKNOWN for beat in beats)
        return Passed(self._number(store), lost, scan.bells)

    def _number(self, store: Store) -> int:
        normalise(store, self._one_decode_node)
        form, names = form_of(store)
        key = marshal.dumps(form, 2)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._images)
            self._images.append(save(store))
            self.facts.append(_facts(store, names))
        return number


def _twin(store: Store, wall: int = NOW_MS) -> MemoryLedger:
    twin = MemoryLedger(lambda: wall)
    twin.store = store
    return twin


def _apply(twin: MemoryLedger, command: Any, not_after_ms: int) -> Any:
    try:
        return twin.apply(command, not_after_ms)
    except Exception as error:
        raise Violation(f"the ledger cannot apply {command}: {error!r}") from error


def _events(store: Store) -> list[Event]:
    return [event for _, event in store.events.get(WEB, ())]


def _facts(store: Store, names: frozenset[str]) -> Facts:
    busy = store.queue or store.waiters or store.deadlines or store.rings or store.open_leases or store.owned
    nodes = {incarnation: node for incarnation, node in store.nodes.items() if incarnation != WEB}
    alive = all(node.state == "alive" and store.fresh(incarnation) for incarnation, node in nodes.items())
    return Facts(
        NAMES.mask(names),
        tuple([(one, NAMES.bit(one.name)) for one in garbage_of(store)]),
        frozenset(uid for uid, record in store.records.items() if record.in_process),
        frozenset(nodes) if alive and not busy else None,
    )
