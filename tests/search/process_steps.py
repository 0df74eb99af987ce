"""What processes do, by number: each happening of each process in each situation is worked out once."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

from app.protocol import effects as do
from app.protocol import events as on
from tests.search.configuration import Configuration
from tests.search.images import load, save
from tests.search.process import BELL_ID, Outgoing, Process, View
from tests.search.process_form import Tags, forget, form_of, normalise, stale_of
from tests.search.renaming import Renaming
from tests.search.values import NAMES, VALUES
from tests.search.violation import Violation


class Happening(IntEnum):
    """What happens to a process; most come with one or two numbers."""

    BELL = 0  # value of a Bell
    ANSWERED = 1  # tag, value of an answer
    NO_ANSWER = 2  # tag
    CALLED = 3  # number of the call, value of a message
    CALL_ENDED = 4  # tag, value of a reply; or -1
    TOLD = 5  # value of a HostEvent
    POLL = 6
    ENGINE = 7
    SEAL = 8
    COPY = 9  # value of a View; or -1
    VALIDATE = 10  # value of a View; or -1
    TIME = 11  # milliseconds that pass


class Fresh(NamedTuple):
    """What a process may draw."""

    name: str
    generation: int


class Step(NamedTuple):
    """What comes of a happening: the next situation, what the process wants, and new tags (None: as they were)."""

    process: int
    wants: tuple[Outgoing, ...]
    tags: Tags | None
    quiet: bool
    """It has acknowledged calls at most: it has asked nothing of anybody, of engine and mover neither, holds what it
    held before, and looks for work as it did before."""
    drew: bool
    """It has drawn a name or a generation."""


class Facts(NamedTuple):
    """What others see of a process in a situation."""

    names: frozenset[str]
    stale: int
    """Those of KV that nobody owns any more."""
    wants_bells: bool
    at_rest: bool
    may_leave: bool
    """It was asked to drain, and nothing holds it any more."""
    timer_ms: int | None
    engine_works: bool
    job: do.Seal | do.Check | do.Pull | None
    copied: bool
    num_tags: int
    """Questions and calls on their way; their tags are 1 up to this."""


NOBODY = 0
"""Tag of what nobody waits for."""
Key = tuple[int, Happening, int, int]


class ProcessSteps:
    """Situations of processes by number."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._numbers: dict[bytes, int] = {}
        self._images: list[bytes] = []
        self.facts: list[Facts] = []
        self._steps: dict[Key, Step] = {}
        self._draws: dict[Key, dict[Fresh, Step]] = {}
        self._forgotten: dict[tuple[int, int], int] = {}
        self._views: dict[tuple[int, tuple[int, ...]], int] = {}

    def boot(self, name: str, incarnation: str) -> int:
        """A process that has just started."""
        return self._number(Process(self._configuration, name, incarnation))[0]

    def step(self, process: int, happening: Happening, a: int, b: int, fresh: Callable[[], Fresh]) -> Step:
        """What comes of a happening. ``fresh`` is asked where the process draws something."""
        key = (process, happening, a, b)
        step = self._steps.get(key)
        if step is not None:
            return step
        drawn = fresh()
        draws = self._draws.get(key)
        if draws is not None:
            step = draws.get(drawn)
            if step is not None:
                return step
        step, used = self._work_out(key, drawn)
        if used:
            self._draws.setdefault(key, {})[drawn] = step
        else:
            self._steps[key] = step
        return step

    def view(self, process: int, blocks: tuple[int, ...]) -> int:
        """Value of what a peer reads in these blocks now."""
        key = (process, blocks)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = VALUES.number(self.copy_of(process).memory.view(blocks))
        return view

    def forget(self, process: int, stale: int) -> int:
        """The situation without KV that nobody will read any more."""
        key = (process, stale)
        number = self._forgotten.get(key)
        if number is None:
            copy = self.copy_of(process)
            forget(copy, NAMES.names(stale))
            number = self._forgotten[key] = self._number(copy)[0]
        return number

    def rename(self, process: int, renaming: Renaming) -> int:
        """The situation with other names."""
        return self._number(renaming.mutable(self.copy_of(process)))[0]

    def copy_of(self, process: int) -> Process:
        """A process in this situation, to look at."""
        copy: Process = load(self._images[process])
        return copy

    def known_steps(self) -> list[Key]:
        """What has been worked out, where nothing was drawn."""
        return list(self._steps)

    def known_draws(self) -> list[tuple[Key, Fresh]]:
        """What has been worked out, and what was drawn."""
        return [(key, fresh) for key, draws in self._draws.items() for fresh in draws]

    def __len__(self) -> int:
        return len(self._images)

    def _work_out(self, key: Key, fresh: Fresh) -> tuple[Step, bool]:
        number, happening, a, b = key
        process = self.copy_of(number)
        process.supply.name, process.supply.generation = fresh
        process.supply.used = False
        before = _what_others_may_meet(process)
        try:
            perform(process, happening, a, b)
            process.machine.audit()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{process.incarnation}: {happening.name} ends with {error!r}") from error
        used = process.supply.used
        process.supply.name, process.supply.generation, process.supply.used = "", 0, False
        wants, process.out = process.out, []
        after, tags = self._number(process)
        changed = {old: new for old, new in tags.items() if old != new}
        quiet = not used and before == _what_others_may_meet(process)
        quiet = quiet and all(isinstance(wanted, do.ReplyTo) for wanted in wants)
        retagged = tuple(_retagged(one, tags) for one in wants)
        return Step(after, retagged, tags if changed else None, quiet, used), used

    def _number(self, process: Process) -> tuple[int, Tags]:
        tags = normalise(process)
        form, names = form_of(process)
        key = marshal.dumps(form, 2)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._images)
            self._images.append(save(process))
            self.facts.append(_facts(process, names))
        return number, tags


def perform(process: Process, happening: Happening, a: int, b: int) -> None:
    """Let it happen."""
    match happening:
        case Happening.ENGINE:
            process.engine_moves()
        case Happening.SEAL:
            process.seal()
        case Happening.COPY:
            process.copy(_view(a))
        case Happening.VALIDATE:
            process.validate(_view(a))
        case Happening.POLL:
            process.poll()
        case Happening.TIME:
            process.now += a / 1000
        case _:
            process.hear(event_of(process, happening, a, b))


def event_of(process: Process, happening: Happening, a: int, b: int) -> on.Event:
    """The event that the machine hears."""
    match happening:
        case Happening.BELL:
            return on.BellRang(BELL_ID, VALUES[a].uid, VALUES[a].attempt)
        case Happening.ANSWERED:
            return on.Answered(a, VALUES[b])
        case Happening.NO_ANSWER:
            return on.AskFailed(a, "no answer")
        case Happening.CALLED:
            return on.Called(f"call-{a}", VALUES[b])
        case Happening.CALL_ENDED:
            return on.CallEnded(a, VALUES[b] if b >= 0 else None)
        case _:
            event: on.Event = VALUES[a]
            return event


def _what_others_may_meet(process: Process) -> tuple[Any, ...]:
    """Jobs of engine and mover, what is held and not on its way out, and how more is looked for."""
    machine = process.machine
    held = [(key, one.ending, one.told) for key, one in machine.table.items()]
    return len(process.inbox), len(process.jobs), held, machine.registered, machine._asking_for_work


def _view(number: int) -> View | None:
    view: View | None = VALUES[number] if number >= 0 else None
    return view


def _retagged(wanted: Outgoing, tags: Tags) -> Outgoing:
    if isinstance(wanted, do.Ask | do.Call):
        return replace(wanted, tag=tags.get(wanted.tag, NOBODY))
    return wanted


def _facts(process: Process, names: frozenset[str]) -> Facts:
    machine = process.machine
    return Facts(
        names=names,
        stale=NAMES.mask(stale_of(process)),
        wants_bells=machine.wants_bells,
        at_rest=process.at_rest,
        may_leave=machine.draining and machine.idle,
        timer_ms=process.timer_ms,
        engine_works=process.engine_works,
        job=process.jobs[0] if process.jobs else None,
        copied=process.copied,
        num_tags=len(machine._questions) + len(machine._calls),
    )
