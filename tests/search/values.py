"""Every frozen value of a search by number, so that a state is a handful of small integers and compares at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any

from app.ledger.memory import ends
from app.protocol import commands, effects, events, holding, messages, tables
from app.protocol.commands import attempts, nodes, requests
from app.protocol.decode import lease
from app.protocol.prefill import attempt
from app.schemas import Frozen

_NAME = re.compile(r"\b(?:[pd]\d[-.]\d+|call-\d+|u\d+)\b")
"""Drawn ids and incarnations of nodes (``p0-1``, ``p0.1``), calls between nodes, uids."""


def _frozen_types(*modules: ModuleType) -> Iterator[type]:
    for module in modules:
        for thing in vars(module).values():
            if isinstance(thing, type) and _is_frozen(thing):
                yield thing


def _is_frozen(kind: type) -> bool:
    if issubclass(kind, Frozen | Enum):
        return True
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


VALUE_TYPES = frozenset(
    _frozen_types(attempt, attempts, commands, effects, ends, events, holding, lease, messages, nodes, requests, tables)
)
"""What never changes: commands, answers, messages, events, jobs, states."""


def names_in(text: str) -> frozenset[str]:
    """The ids that a text mentions."""
    return frozenset(_NAME.findall(text))


def generation_name(incarnation: str, generation: int) -> str:
    """How a block's generation at a node is told apart from that of others."""
    return f"{incarnation}#{generation}"


class Names:
    """A bit for each name, so that a set of names is an integer."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._names: list[str] = []

    def bit(self, name: str) -> int:
        """The bit of ``name``."""
        bit = self._bits.get(name)
        if bit is None:
            bit = self._bits[name] = 1 << len(self._names)
            self._names.append(name)
        return bit

    def mask(self, names: frozenset[str]) -> int:
        """The bits of ``names``."""
        return sum(map(self.bit, names))

    def names(self, mask: int) -> frozenset[str]:
        """The names of a mask."""
        return frozenset(name for place, name in enumerate(self._names) if mask >> place & 1)


NAMES = Names()


def _names_of(value: Any) -> frozenset[str]:
    names = names_in(repr(value))
    if isinstance(value, messages.Commit | effects.Pull):
        names |= {generation_name(value.location.incarnation, number) for number in value.generations}
    return names


class Values:
    """Numbers for hashable values; equal ones of one type have one number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[type, Any], int] = {}
        self._values: list[Any] = []
        self._names: list[frozenset[str]] = []

    def number(self, value: Any) -> int:
        """The number of ``value``."""
        key = (type(value), value)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._values)
            self._values.append(value)
            self._names.append(_names_of(value))
        return number

    def __getitem__(self, number: int) -> Any:
        return self._values[number]

    def names(self, number: int) -> frozenset[str]:
        """The ids that a value mentions."""
        return self._names[number]


VALUES = Values()
"""One numbering for the whole process: pickles refer to it."""


def fields_of(thing: Any) -> tuple[str, ...]:
    """Field names of a dataclass instance."""
    return tuple(field.name for field in dataclasses.fields(thing))
