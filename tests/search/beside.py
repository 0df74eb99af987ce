"""The same cluster beside a search, whose processes and ledger are never brought into a normal form.

What a search does to its own, step by step, is done to these too: with clocks that run on, tags and generations that
count on, and names that are never used again. What comes of it must be the same but for those names.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from app.ledger.memory import MemoryLedger
from app.protocol import effects as do
from app.protocol.commands import Heartbeat, NodeStatus, Register, Scan
from app.schemas import Gauges, NodeInfo
from tests.search.configuration import NEVER_MS, Configuration
from tests.search.ledger_form import NOW_MS
from tests.search.ledger_steps import WEB, Applied, Passed
from tests.search.names import Names
from tests.search.process import Process
from tests.search.process_form import order_timers
from tests.search.process_steps import NOBODY, Fresh, Happening, Step, perform
from tests.search.values import VALUES

_WITH_TAG = (Happening.ANSWERED, Happening.NO_ANSWER, Happening.CALL_ENDED)
_VALUE_FIRST = (Happening.BELL, Happening.TOLD)
_VALUE_SECOND = (Happening.ANSWERED, Happening.CALLED, Happening.CALL_ENDED)


class Different(AssertionError):
    """A normal form behaves differently from what it stands for."""


class Beside:
    """Raises Different."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.names = Names()
        self._processes: dict[int, Process] = {}
        self._tags: dict[int, dict[int, int]] = {}
        """Of each process: a tag in the search → ours."""
        self._wall = NOW_MS + 12_345
        self._ledger = MemoryLedger(lambda: self._wall)
        self._ledger.execute(Register(NodeInfo(incarnation=WEB, role="web", name=WEB, pid=1, host="h"), NEVER_MS))
        self._saved = self._ledger.save()
        self.compared = 0

    # processes

    def boot(self, name: str, incarnation: str) -> None:
        """A process starts."""
        place = self._configuration.nodes.index(name)
        process = Process(self._configuration, name, self.names.new(incarnation))
        process.now = 77.0 + 10 * self.compared
        self._processes[place], self._tags[place] = process, {}

    def hear(self, place: int, key: tuple[Happening, int, int], step: Step, incarnation: str, fresh: Fresh) -> None:
        """Something has happened to a process of the search, which is called ``incarnation`` there."""
        process = self._processes[place]
        process.supply.name, process.supply.generation = self.names.next(fresh.name), self.names.next_generation
        process.supply.used = False
        if key[0] is Happening.TIME:
            process.now = round(process.now + key[1] / 1000, 3)
        else:
            order_timers(process.machine)
            self._perform(process, *self._in_our_names(place, *key))
        if not process.supply.name:
            self.names.new(fresh.name)
        if process.supply.used:
            self.names.new_generation(incarnation, fresh.generation)
        wants, process.out = process.out, []
        self._compare_wants(place, step, wants)

    def _in_our_names(self, place: int, happening: Happening, a: int, b: int) -> tuple[Happening, int, int]:
        if happening in _WITH_TAG:
            a = self._tags[place].pop(a)
        elif happening in _VALUE_FIRST:
            a = VALUES.number(self.names.translate(VALUES[a]))
        elif happening is Happening.CALLED:
            a = self.names.number(a)
        if happening in _VALUE_SECOND and b >= 0:
            b = VALUES.number(self.names.translate(VALUES[b]))
        return happening, a, b

    def _perform(self, process: Process, happening: Happening, a: int, b: int) -> None:
        if happening in (Happening.COPY, Happening.VALIDATE):
            job = process.jobs[0]
            assert isinstance(job, do.Pull)
            owners = [one for one in self._processes.values() if one.incarnation == job.location.incarnation]
            a = VALUES.number(owners[0].memory.view(job.source)) if a >= 0 else -1
        perform(process, happening, a, b)

    def _compare_wants(self, place: int, step: Step, wants: list[Any]) -> None:
        tags = self._tags[place]
        if step.tags is not None:
            tags = {step.tags[tag]: ours for tag, ours in tags.items()}
        self._must_be(len(wants), len(step.wants), step)
        for ours, theirs in zip(wants, step.wants, strict=True):
            if isinstance(theirs, do.Ask | do.Call) and theirs.tag != NOBODY:
                tags[theirs.tag] = ours.tag
            self._must_be(_untagged(ours), _untagged(self.names.translate(theirs)), step)
        self._tags[place] = tags

    # the ledger

    def apply(self, command: int, late: bool, applied: Applied) -> None:
        """The search has applied a command."""
        not_after_ms = self._ledger.time_ms() - late
        answer: Any = self._ledger.apply(self.names.translate(VALUES[command]), not_after_ms)
        theirs = self.names.translate(VALUES[applied.answer])
        unnamed = {"time_ms": 0, "admitted_wall_ms": 0, "run_id": ""}
        fields = {name: nothing for name, nothing in unnamed.items() if hasattr(answer, name)}
        self._must_be(dataclasses.replace(answer, **fields), dataclasses.replace(theirs, **fields), VALUES[command])

    def pass_time(self, ms: int, beating: tuple[str, ...], passed: Passed) -> None:
        """Time has passed for the ledger of the search."""
        self._wall += ms
        beats = [self._ledger.execute(Heartbeat(self.names.translate(one), Gauges())) for one in beating]
        scan = self._ledger.execute(Scan(min_age_ms=0))
        self._must_be(tuple(beat.status is NodeStatus.UNKNOWN for beat in beats), passed.lost, "heartbeats")
        self._must_be(scan.bells, passed.bells, "bells of a scan")

    def keep(self) -> None:
        """The search keeps a copy of its ledger."""
        self._saved = self._ledger.save()

    def roll_back(self) -> None:
        """The search goes back to its copy."""
        self._ledger.restore(copy.deepcopy(self._saved))

    def _must_be(self, ours: Any, theirs: Any, what: Any) -> None:
        self.compared += 1
        if ours != theirs:
            raise Different(f"{what}:\n  normal form:  {theirs}\n  without one:  {ours}")


def _untagged(want: Any) -> Any:
    return dataclasses.replace(want, tag=0) if hasattr(want, "tag") else want
