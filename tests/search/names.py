"""Names of a search in those of the cluster beside it, which uses each only once."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

from app.protocol.messages import Commit
from app.schemas import Frozen

_NAME = re.compile(r"\b(?:[pd]\d[-.]\d+|call-\d+)\b")
_FIRST = 1001


class Names:
    """What each name that the search uses at the moment is called beside it."""

    def __init__(self) -> None:
        self._ours: dict[str, str] = {}
        self._generations: dict[tuple[str, int], int] = {}
        self._given: Counter[str] = Counter()

    def new(self, name: str) -> str:
        """The search begins to use ``name`` for something new."""
        ours = self._ours[name] = self.next(name)
        stem, _, _ = re.split(r"(\d+$)", name)
        self._given[stem] += 1
        return ours

    def next(self, name: str) -> str:
        """What ``new`` would answer."""
        stem, _, _ = re.split(r"(\d+$)", name)
        return f"{stem}{_FIRST + self._given[stem]}"

    def new_generation(self, incarnation: str, generation: int) -> None:
        """The search begins to use a generation for something new."""
        self._generations[incarnation, generation] = self.next_generation
        self._given["generation"] += 1

    @property
    def next_generation(self) -> int:
        """What the next new generation is called."""
        return _FIRST + self._given["generation"]

    def number(self, call: int) -> int:
        """The number of a call."""
        return int(self._ours[f"call-{call}"].removeprefix("call-"))

    def translate(self, value: Any) -> Any:
        """The same with our names."""
        if type(value) is str:
            return _NAME.sub(lambda found: self._ours[found[0]], value)
        if isinstance(value, tuple):
            return tuple(self.translate(one) for one in value)
        if isinstance(value, Frozen):
            fields = {name: self.translate(getattr(value, name)) for name in type(value).model_fields}
            if isinstance(value, Commit):
                owner = value.location.incarnation
                fields["generations"] = tuple(self._generations[owner, number] for number in value.generations)
            return type(value)(**fields)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: self.translate(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return type(value)(**fields)
        return value
