"""Whether what a search does promptly could as well have waited: the justification of ``prompt``.

A prompt move is a happening ``e`` of one process that asks nothing of anybody. Had it waited, other happenings ``f`` of
the same process would have come first. For each ``e`` that a search did promptly and each ``f`` that it met at the
process afterwards (until time passed, which ``e`` never lets pass), both orders must lead to the same situation and
ask the same of others; then an ``e`` that waits leads nowhere else.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from app.protocol import effects as do
from tests.search.process import Outgoing
from tests.search.process_steps import NOBODY, Fresh, Happening, Key, ProcessSteps, Step, Tags
from tests.search.values import VALUES

_ANSWERS = (Happening.ANSWERED, Happening.NO_ANSWER)
_WITH_TAG = (*_ANSWERS, Happening.CALL_ENDED)
_NOTHING = Fresh("", 0)


class Waiting(NamedTuple):
    """A process where ``without`` is what it would be if ``happening`` (``a``, ``b``) were still to come."""

    process: int
    without: int
    happening: Happening
    a: int
    b: int
    noisy: bool = False
    """What waits asks something of others by now, together with what came first: a call of theirs may be due to it."""


def conflicts(steps: ProcessSteps, prompt: set[Key]) -> list[str]:
    """What does not commute with a prompt happening, in words."""
    met = _met(steps)
    found: list[str] = []
    todo = [Waiting(_step(steps, key, _NOTHING).process, *key) for key in sorted(prompt)]
    seen = set(todo)
    while todo:
        waiting = todo.pop()
        for happening, a, b, fresh in met.get(waiting.process, ()):
            after = _other_order(steps, waiting, (happening, a, b), fresh, found)
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)
    return found


def _met(steps: ProcessSteps) -> dict[int, list[tuple[Happening, int, int, Fresh]]]:
    met = defaultdict(list)
    for process, happening, a, b in steps.known_steps():
        met[process].append((happening, a, b, _NOTHING))
    for (process, happening, a, b), fresh in steps.known_draws():
        met[process].append((happening, a, b, fresh))
    return met


def _other_order(
    steps: ProcessSteps, waiting: Waiting, other: tuple[Happening, int, int], fresh: Fresh, found: list[str]
) -> Waiting | None:
    """Compare both orders; answers what follows where ``waiting`` waits on."""
    happening, a, b = other
    first = steps.step(waiting.without, waiting.happening, waiting.a, waiting.b, lambda: _NOTHING)
    tag = _tag_before(first, a) if happening in _WITH_TAG else a
    if fresh.name and fresh.name in VALUES.names(waiting.b):
        return None  # what waits is about a name that would still be in use: nobody holds it any more
    if not _could_come_first(steps, waiting, happening, tag) or (waiting.noisy and happening is Happening.CALLED):
        return None
    came_first = (waiting.without, happening, tag, b)
    overtaking = _step(steps, came_first, fresh)
    as_met = _step(steps, (waiting.process, happening, a, b), fresh)
    own = overtaking.tags[waiting.a] if waiting.happening in _WITH_TAG and overtaking.tags else waiting.a
    later = (overtaking.process, waiting.happening, own, waiting.b)
    then = _step(steps, later, _NOTHING)
    in_order = [_retagged(want, as_met.tags) for want in first.wants] + list(as_met.wants)
    overtaken = [_retagged(want, then.tags) for want in overtaking.wants] + list(then.wants)
    unheard = f"call-{waiting.a}" if waiting.happening is Happening.CALLED else ""
    if then.process != as_met.process or _sorted(in_order, unheard) != _sorted(overtaken, unheard):
        found.append(f"{waiting} and {other}:\n  {overtaken} {then.process}\n  {in_order} {as_met.process}")
        return None
    if as_met.process == waiting.process:  # it may come any number of times; once is enough
        return None
    return Waiting(as_met.process, *later, not then.quiet)


def _could_come_first(steps: ProcessSteps, waiting: Waiting, happening: Happening, tag: int) -> bool:
    facts = steps.facts[waiting.without]
    if happening in _WITH_TAG and tag > facts.num_tags:
        return False  # it answers something that would not have been asked
    match happening:
        case Happening.TIME:
            return False
        case Happening.ANSWERED | Happening.NO_ANSWER:
            return waiting.happening not in _ANSWERS  # answers come in their order
        case Happening.BELL:
            return facts.wants_bells
        case Happening.POLL:
            return facts.timer_ms is not None and facts.timer_ms <= 0
        case _:
            return True


def _step(steps: ProcessSteps, key: Key, fresh: Fresh) -> Step:
    return steps.step(*key, lambda: fresh)


def _tag_before(step: Step, tag: int) -> int:
    if step.tags is None or tag not in step.tags.values():
        return tag
    return next(old for old, new in step.tags.items() if new == tag)


def _sorted(wants: list[Outgoing], unheard: str) -> tuple[list[Outgoing], list[str]]:
    """Questions in their order; the rest in any, without the reply to a call that nobody waits for."""
    asks: list[Outgoing] = [want for want in wants if isinstance(want, do.Ask)]
    others = [want for want in wants if not isinstance(want, do.Ask)]
    return asks, sorted(repr(one) for one in others if not (isinstance(one, do.ReplyTo) and one.call_id == unheard))


def _retagged(want: Outgoing, tags: Tags | None) -> Outgoing:
    if tags is None or not isinstance(want, do.Ask | do.Call) or want.tag == NOBODY:
        return want
    return type(want)(tags[want.tag], *[getattr(want, name) for name in want.__slots__ if name != "tag"])
