"""What a mutant is: a named guard, the promise that rests on it, how to remove it, and the tests that must go red."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BOTH_LEDGERS = ("twin", "valkey")


class NoLongerApplies(Exception):
    """The code moved on: the mutant's anchor or its test has to be brought up to date."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One textual replacement.

    ``old`` stands exactly once in the files that match the glob ``where``, and space and line ends between its words
    may differ: so an edit survives that a file is split or formatted anew.
    """

    where: str
    old: str
    new: str

    def find(self, root: Path) -> tuple[Path, re.Match[str]]:
        """The file and place to change.

        Raises:
            NoLongerApplies: there is none, or more than one.
        """
        pattern = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        found = [
            (path, match)
            for path in sorted(root.glob(self.where))
            if path.is_file()
            for match in pattern.finditer(path.read_text())
        ]
        if len(found) != 1:
            raise NoLongerApplies(f"{self.where}: its anchor {self.old!r} stands there {len(found)} times")
        return found[0]

    def changed(self, root: Path) -> tuple[Path, str]:
        """The file and what it says without the guard. Raises as ``find``."""
        path, match = self.find(root)
        text = path.read_text()
        return path, text[: match.start()] + self.new + text[match.end() :]

    def apply(self, root: Path) -> Path:
        """Change the file, as a new one: the old may be shared with another copy of the tree."""
        path, text = self.changed(root)
        path.unlink()
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        return path


@dataclass(frozen=True, slots=True)
class Mutant:
    """A guard that is taken away. ``tests`` are pytest node ids; each is green without the mutant."""

    name: str
    promise: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    """A red test is wanted with each of these among its parameters: the guard exists once for each."""
    also: tuple[str, ...] = ()
    """Exceptions that say here, besides failed assertions, that the promise is broken."""

    def apply(self, root: Path) -> list[str]:
        """Change the tree at ``root``; answers which files.

        Raises:
            NoLongerApplies: names the mutant and what it did not find.
        """
        with self._named():
            return [str(edit.apply(root).relative_to(root)) for edit in self.edits]

    def check(self, root: Path) -> list[tuple[Path, str]]:
        """What ``apply`` would write where, and whether its tests are there. Raises as ``apply``."""
        for test in self.tests:
            file, _, function = test.partition("::")
            name = function.partition("[")[0]
            path = root / file
            if not path.is_file() or (name and f"def {name}(" not in path.read_text()):
                raise NoLongerApplies(f"mutant {self.name} no longer applies: there is no test {test}")
        with self._named():
            return [edit.changed(root) for edit in self.edits]

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except NoLongerApplies as error:
            raise NoLongerApplies(f"mutant {self.name} no longer applies to {error}") from None


def ledger(
    name: str,
    promise: str,
    *,
    lua: tuple[Edit, ...],
    twin: tuple[Edit, ...],
    tests: tuple[str, ...],
    also: tuple[str, ...] = (),
) -> Mutant:
    """A guard that the scripts and the memory twin both have.

    It is removed from both at once, so that their comparison cannot notice it, and each must be caught by itself.
    """
    return Mutant(name, promise, lua + twin, tests, BOTH_LEDGERS, also)


def lua(old: str, new: str, where: str = "**/*.lua") -> Edit:
    """An edit of the ledger's scripts."""
    return Edit(f"app/ledger/lua/{where}", old, new)


def twin(old: str, new: str, where: str = "*.py") -> Edit:
    """An edit of the ledger's memory twin."""
    return Edit(f"app/ledger/memory/{where}", old, new)
