"""States that differ only in which names were drawn are one: the names in use are numbered without gaps.

Names are compared for equality, and where the code sorts them (holdings, lines of equal age) one order is as good as
any, since real ones are random; so a renaming that keeps their order changes nothing. A fence, a lease, a call or a
life of a process that nobody mentions any more thus leaves no trace. Generations keep their numbers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from enum import Enum
from functools import cache, partial
from types import MethodType
from typing import Any

from app.schemas import Frozen
from tests.search.state import BELL, CALL, EXIT, MESSAGE, REPLY, Item, Slot
from tests.search.values import VALUE_TYPES, VALUES, fields_of

_DRAWN = re.compile(r"\b([pd]\d[-.]|call-)(\d+)\b")


class Renaming:
    """New numbers for drawn names: by family (``p0-``, ``p0.``, ``call-``), what a number becomes."""

    def __init__(self, families: dict[str, dict[int, int]]) -> None:
        self._families = families
        self._values: dict[int, int] = {}

    def number(self, family: str, number: int) -> int:
        """What becomes of a number of a family."""
        return self._families.get(family, {}).get(number, number)

    def text(self, text: str) -> str:
        """A text with its names renamed."""
        return _DRAWN.sub(lambda match: f"{match[1]}{self.number(match[1], int(match[2]))}", text)

    def value(self, number: int) -> int:
        """The number of a value with its names renamed."""
        known = self._values.get(number)
        if known is None:
            value = VALUES[number]
            known = number if not VALUES.names(number) else VALUES.number(self._frozen(value))
            self._values[number] = known
        return known

    def slot(self, node: str, slot: Slot, process: int) -> Slot:
        """What is on its way from and to ``node``, whose process is renamed already."""
        return slot._replace(
            life=self.number(f"{node}.", slot.life),
            process=process,
            calls=tuple([(tag, self.value(command), left) for tag, command, left in slot.calls]),
            answers=tuple([(tag, answer if answer < 0 else self.value(answer)) for tag, answer in slot.answers]),
            open=tuple(
                [(self.number("call-", call), tag, left, self.value(peer)) for call, tag, left, peer in slot.open]
            ),
        )

    def net(self, net: tuple[Item, ...]) -> tuple[Item, ...]:
        """What is on its way between processes."""
        return tuple(sorted(map(self._item, net)))

    def _item(self, item: Item) -> Item:
        match item[0]:
            case kind if kind == MESSAGE:
                _, call, receiver, incarnation, message, late = item
                return (
                    MESSAGE,
                    self.number("call-", call),
                    receiver,
                    self.value(incarnation),
                    self.value(message),
                    late,
                )
            case kind if kind == REPLY:
                return (REPLY, self.number("call-", item[1]), *item[2:])
            case kind if kind in (CALL, EXIT):
                return (kind, self.value(item[1]), *item[2:])
        assert item[0] == BELL
        return item

    def mutable(self, thing: Any, done: dict[int, Any] | None = None) -> Any:
        """Rename in a thing that changes, in place where somebody else may know it by identity."""
        done = {} if done is None else done
        kind = type(thing)
        if kind is str:
            return self.text(thing)
        if kind in VALUE_TYPES:
            return VALUES[self.value(VALUES.number(thing))]
        if kind in (int, float, bool, type(None), MethodType) or isinstance(thing, Enum) or id(thing) in done:
            return done.get(id(thing), thing)
        if isinstance(thing, tuple | frozenset | set):
            return kind([self.mutable(one, done) for one in thing])
        if isinstance(thing, partial):
            return partial(thing.func, *[self.mutable(one, done) for one in thing.args])
        done[id(thing)] = thing
        if isinstance(thing, list | deque):
            entries = [self.mutable(one, done) for one in thing]
            thing.clear()
            thing.extend(entries)
        elif isinstance(thing, Counter):
            pass  # of states
        elif isinstance(thing, dict):
            pairs = [(self.mutable(key, done), self.mutable(one, done)) for key, one in thing.items()]
            thing.clear()
            thing.update(pairs)
        else:
            for name in _names_of(thing):
                setattr(thing, name, self.mutable(getattr(thing, name), done))
        return thing

    def _frozen(self, value: Any) -> Any:
        """A frozen value renamed: nothing in it is known by identity."""
        if isinstance(value, Enum):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, tuple | frozenset):
            return type(value)([self._frozen(one) for one in value])
        if isinstance(value, dict):
            return {self._frozen(key): self._frozen(one) for key, one in value.items()}
        if isinstance(value, Frozen):
            return value.model_copy(
                update={name: self._frozen(getattr(value, name)) for name in type(value).model_fields}
            )
        if hasattr(value, "__dataclass_fields__"):
            return type(value)(**{name: self._frozen(getattr(value, name)) for name in fields_of(value)})
        return value


def _names_of(thing: Any) -> tuple[str, ...]:
    return tuple(vars(thing)) if hasattr(thing, "__dict__") else fields_of(thing)


@cache
def renaming(names: frozenset[str]) -> Renaming | None:
    """The renaming that closes the gaps between names in use; None where there are none."""
    used: defaultdict[str, list[int]] = defaultdict(list)
    for name in names:
        match = _DRAWN.fullmatch(name)
        if match is not None:
            used[match[1]].append(int(match[2]))
    families = {
        family: dict(zip(sorted(numbers), range(1, len(numbers) + 1), strict=True)) for family, numbers in used.items()
    }
    moved = {family: new for family, new in families.items() if any(old != now for old, now in new.items())}
    return Renaming(moved) if moved else None
