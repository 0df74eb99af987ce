"""The normal form of a process: of all that behave alike from now on, one.

Time is counted from now, tags of what is on its way from 1, and what can no longer matter is left out. Each line below
says why it cannot.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from app.protocol.decode import DecodeNode
from app.protocol.holding import Held
from app.protocol.prefill.attempt import Attempt, Phase
from app.protocol.prefix_cache import CacheCounts, PrefixPool
from app.protocol.tables import BlockState
from tests.search.images import Freezer
from tests.search.process import Process
from tests.search.values import generation_name

Tags = dict[int, int]
_LAST_RING = 2
_JUNK = 7
"""KV that is nobody's."""


def normalise(process: Process) -> Tags:
    """Bring ``process`` into its normal form; answers the new tag of each question and call on its way."""
    machine: Any = process.machine
    machine.refusals.clear()
    _count_time_from_now(process)
    for held in machine.table.values():
        _normalise_held(held, machine.config.grant_timeout_s)
    for question in machine._questions.values():
        _normalise_question(question)
    _normalise_timers(machine)
    _normalise_memory(process)
    return _number_tags(machine)


def _count_time_from_now(process: Process) -> None:
    """The machine knows differences of times only."""
    machine: Any = process.machine
    machine._timers = [(round(at - process.now, 3), tag, what) for at, tag, what in machine._timers]
    for held in machine.table.values():
        if isinstance(held, Attempt):
            held.claimed_at -= process.now
    machine._now = process.now = 0.0


def _normalise_held(held: Any, grant_timeout_s: float) -> None:
    held.outcome = ""  # only told to whoever waits for the bell's task
    if isinstance(held, Attempt):
        held.rings = min(held.rings, _LAST_RING)  # the pauses stay the same from there on
        # Compared with the timeout alone.
        held.claimed_at = 0.0 if math.isinf(grant_timeout_s) else max(held.claimed_at, -grant_timeout_s - 1.0)
    else:
        held.committed_at = 0.0  # only for the timeline
    if held.ending:  # how far it had got does not matter any more
        held.phase = next(iter(type(held.phase)))
        for name, nothing in _ATTEMPT_WAS.items() if isinstance(held, Attempt) else _LEASE_WAS.items():
            setattr(held, name, nothing)


_ATTEMPT_WAS = {"grant": None, "rings": 0, "token": -1, "first_token_told": False, "sealed": None, "stamped": False}
_LEASE_WAS = {"commit": None, "work": None, "output": [], "told_length": 0, "finish": None, "emitting": False}


def _normalise_question(question: Any) -> None:
    question.tries = max(question.tries, -1)  # below zero: without end


def _normalise_timers(machine: Any) -> None:
    timers = [timer for timer in machine._timers if _still_matters(machine, timer[2])]
    current = machine._check_due
    machine._check_due = 0  # compared with the timer's for equality alone; only the current one's is left
    for number, (at, tag, what) in enumerate(timers):
        function = what.func if isinstance(what, partial) else what
        name, args = function.__name__, what.args if isinstance(what, partial) else ()
        if name == "_check_if_due":
            assert args == (current,)
            what = partial(function, 0)
        elif name == "_pull_overdue":
            args[1].patience = 0  # as above
            what = partial(function, *args[:2], 0)
        elif name == "_send_question":
            _normalise_question(args[0])
        timers[number] = (at, tag, what)
    for held in machine.table.values():
        if isinstance(held, Attempt) and not any(_is_patience(timer[2], held) for timer in timers):
            held.patience = 0
    machine._timers = timers
    order_timers(machine)


def order_timers(machine: Any) -> None:
    """Of timers that are due at the same moment one order is as good as any: that of their names, and of what they are
    about."""
    timers = sorted(((round(at, 3), tag, what) for at, tag, what in machine._timers), key=_order)
    tags = sorted((at, tag) for at, tag, _ in timers)
    machine._timers = [(at, tag, what) for (at, tag), (_, _, what) in zip(tags, timers, strict=True)]


def _order(timer: tuple[float, int, Any]) -> tuple[float, str, str, int]:
    at, tag, what = timer
    if not isinstance(what, partial):
        return at, what.__name__, "", tag
    return at, what.func.__name__, what.args[0] if isinstance(what.args[0], str) else "", tag


def _is_patience(what: Any, held: Held) -> bool:
    return isinstance(what, partial) and what.func.__name__ == "_pull_overdue" and what.args[1] is held


def _still_matters(machine: Any, what: Any) -> bool:
    """Whether a timer may still do anything: what it looks at first never turns back."""
    if not isinstance(what, partial):
        return True
    match what.func.__name__:
        case "_check_if_due":
            return bool(what.args[0] == machine._check_due)
        case "_ring_decode":
            attempt = machine.table.get(what.args[0])
            return attempt is not None and attempt.grant is None and not attempt.ending
        case "_pull_overdue":
            attempt, patience = what.args[1:]
            return not attempt.ending and attempt.phase is Phase.COMMITTED and attempt.patience == patience
        case "_answer_early":  # a double of that call, should it come, is answered a little later for this
            return what.args[0] in machine._early
    return True


def _normalise_memory(process: Process) -> None:
    memory, machine = process.memory, process.machine
    if isinstance(machine.pool, PrefixPool):
        machine.pool.cache = CacheCounts()  # only told to people
    for block in range(machine.pool.num_blocks):
        if isinstance(machine, DecodeNode):  # nobody reads a decode node's KV, so nobody compares its generations
            memory.generations[block] = machine.pool._generation[block] = 0
        state = machine.pool.owner_of(block)[1]
        if state in (BlockState.FREE, BlockState.CACHED):
            memory.writers[block] = "somebody"  # whoever comes next is another one
        if state is not BlockState.FREE:
            continue
        machine.pool._generation[block] = 0  # drawn anew when it is taken
        if not memory.generations[block]:  # nobody reads it; junk shows as wrong tokens as well as anything
            memory.blocks[block] = [_JUNK] * len(memory.blocks[block])


def stale_of(process: Process) -> frozenset[str]:
    """Generations whose blocks are all free again: they matter only to a peer that has still to read them. Blocks that
    were taken at once have the same; some of them may be cached."""
    memory, pool = process.memory, process.machine.pool
    by_state: dict[bool, set[int]] = {True: set(), False: set()}
    for block in range(pool.num_blocks):
        by_state[pool.owner_of(block)[1] is BlockState.FREE].add(memory.generations[block])
    numbers = by_state[True] - by_state[False]
    return frozenset(generation_name(process.incarnation, number) for number in numbers if number)


def forget(process: Process, stale: frozenset[str]) -> None:
    """Let them go: nobody will read them any more."""
    memory = process.memory
    for block, number in enumerate(memory.generations):
        if generation_name(process.incarnation, number) in stale:
            memory.generations[block] = 0


def _number_tags(machine: Any) -> Tags:
    """From 1: questions, then calls, then timers. Questions and timers in the order in which they were given, in which
    timers that are due at once run; of calls only equality is ever looked at: they come in the order of what they are
    about, so that which of two was made first tells no states apart."""
    calls = sorted(machine._calls, key=lambda tag: _order((0.0, tag, machine._calls[tag])))
    tags = {old: new for new, old in enumerate([*sorted(machine._questions), *calls], 1)}
    machine._questions = {tags[old]: question for old, question in machine._questions.items()}
    machine._calls = {tags[old]: then for old, then in machine._calls.items()}
    machine._timers = [(at, len(tags) + number, what) for number, (at, _, what) in enumerate(machine._timers, 1)]
    machine._tags = len(tags) + len(machine._timers)
    return tags


def form_of(process: Process) -> tuple[Any, frozenset[str]]:
    """The form of a process that is normal, and every id that it mentions."""
    machine: Any = process.machine
    freezer = Freezer({id(held): key for key, held in machine.table.items()})
    freeze = freezer.freeze
    pool, memory = machine.pool, process.memory
    form = (
        process.incarnation,
        tuple((key, freezer.freeze_entry(held)) for key, held in machine.table.items()),
        tuple(freeze(getattr(machine, name)) for name in _plain_fields(machine)),
        tuple((at, freeze(what)) for at, _, what in machine._timers),
        tuple(freeze(part) for part in (pool._free, pool._state, pool._owner, pool._generation)),
        _cache_form(pool, freezer),
        tuple(freeze(part) for part in (memory.blocks, memory.generations, memory.writers)),
        freeze(process.inbox),
        tuple((key, freezer.freeze_entry(running)) for key, running in process.running.items()),
        process.between,
        freeze(process.jobs),
        process.copied,
        process.bells,
    )
    names = freezer.names | set(machine.table) | {process.incarnation}
    numbers = set(memory.generations)
    for held in machine.table.values():
        numbers |= set(getattr(held, "generations", ()))
    return form, frozenset(names | {generation_name(process.incarnation, number) for number in numbers})


def _cache_form(pool: Any, freezer: Freezer) -> Any:
    """What a pool knows of its blocks' content, and who shares them; which key leads where follows from that."""
    if not isinstance(pool, PrefixPool):
        return ()
    return tuple(freezer.freeze(part) for part in (pool._holders, pool._key, pool._digest, tuple(pool._cached)))


_NOT_PLAIN = frozenset({"refusals", "config", "pool", "table", "_now", "_out", "_tags", "_timers", "_draw"})


def _plain_fields(machine: Any) -> list[str]:
    return sorted(name for name in vars(machine) if name not in _NOT_PLAIN)
