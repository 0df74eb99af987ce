"""Images of mutable things: bytes to continue from, and a form in which equal things are equal."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from app.protocol.blocks import BlockPool
from app.protocol.prefix_cache import PrefixPool
from app.protocol.tables import DECODE_BLOCK_STEPS, PREFILL_BLOCK_STEPS
from tests.search.values import VALUE_TYPES, VALUES, names_in

_TABLES = (PREFILL_BLOCK_STEPS, DECODE_BLOCK_STEPS)


def _value(number: int) -> Any:
    return VALUES[number]


def _reduce_value(value: Any) -> Any:
    return _value, (VALUES.number(value),)


def _new_pool(kind: type[BlockPool]) -> BlockPool:
    return kind.__new__(kind)


def _reduce_pool(pool: BlockPool) -> Any:
    """With its table of steps by number: it is the same for all."""
    state = dict(vars(pool))
    steps = state.pop("_steps")
    number = next(number for number, table in enumerate(_TABLES) if table is steps)
    return _new_pool, (type(pool),), (number, state), None, None, _fill_pool


def _fill_pool(pool: BlockPool, state: tuple[int, dict[str, Any]]) -> None:
    pool.__dict__.update(state[1], _steps=_TABLES[state[0]])


_DISPATCH: dict[type, Callable[[Any], Any]] = dict.fromkeys(VALUE_TYPES, _reduce_value)
_DISPATCH[BlockPool] = _DISPATCH[PrefixPool] = _reduce_pool


def save(thing: Any) -> bytes:
    """Bytes to continue from. Frozen values are shared, not copied."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = _DISPATCH  # type: ignore[misc, assignment]
    pickler.dump(thing)
    return buffer.getvalue()


load = pickle.loads


@lru_cache(maxsize=256)
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


class Freezer:
    """Turns a thing into nested tuples of plain values, and collects the ids that it mentions.

    ``shared`` knows, by identity, mutable things that stand in a table and are mentioned elsewhere too.
    """

    def __init__(self, shared: dict[int, str] | None = None) -> None:
        self.names: set[str] = set()
        self._shared = shared or {}

    def freeze(self, thing: Any) -> Any:
        """The form of ``thing``."""
        kind = type(thing)
        if kind in (int, float, bool) or thing is None:
            return thing
        if kind is str:
            self.names |= names_in(thing)
            return thing
        if kind in VALUE_TYPES:
            number = VALUES.number(thing)
            self.names |= VALUES.names(number)
            return ("value", number)
        if id(thing) in self._shared:
            return ("held", self._shared[id(thing)])
        return self._freeze_mutable(thing)

    def freeze_entry(self, thing: Any) -> Any:
        """The form of something that stands in a table itself."""
        return tuple(self.freeze(getattr(thing, name)) for name in _field_names(type(thing)))

    def _freeze_mutable(self, thing: Any) -> Any:
        if isinstance(thing, list | tuple | deque):
            return tuple(self.freeze(one) for one in thing)
        if isinstance(thing, Counter):
            return tuple(sorted((self.freeze(key), count) for key, count in thing.items() if count))
        if isinstance(thing, dict):
            return tuple(sorted((self.freeze(key), self.freeze(one)) for key, one in thing.items()))
        if isinstance(thing, set | frozenset):
            return tuple(sorted(self.freeze(one) for one in thing))
        if isinstance(thing, partial):
            return ("then", self._freeze_function(thing.func), tuple(self.freeze(one) for one in thing.args))
        if callable(thing):
            return ("then", self._freeze_function(thing), ())
        return (type(thing).__name__, self.freeze_entry(thing))

    @staticmethod
    def _freeze_function(function: Any) -> str:
        return str(function.__qualname__)
