"""Writes the generated parts of the documentation: ``python -m app.docs``; ``--check`` only says what is out of date.

A document asks for a part with a pair of comments: ``<!-- settings -->`` … ``<!-- /settings -->`` for the table of all
settings, ``<!-- states -->`` … ``<!-- /states -->`` for the state diagrams.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from app.errors import BatonError
from app.protocol import tables
from app.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
_State = TypeVar("_State", bound=StrEnum)
_NOT_FOR_PEOPLE = frozenset({"incarnation", "failpoints"})


class DocsError(BatonError):
    """A document's markers are wrong."""


def settings_table() -> str:
    """All settings as a Markdown table: variable, default, what for and why this default."""
    rows = ["| variable | default | what for |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        if name not in _NOT_FOR_PEOPLE:
            text = (field.description or "").replace("|", "\\|")
            rows.append(f"| `BATON_{name.upper()}` | {_default(field.default)} | {text} |")
    return "\n".join(rows)


def state_diagrams() -> str:
    """The state tables of ``app/protocol/tables.py`` as Mermaid diagrams."""
    parts = {
        "A request": _diagram(tables.REQUEST_STEPS, tables.RequestState.QUEUED),
        "A lease": _diagram(tables.LEASE_STEPS, tables.LeaseState.RESERVED),
        "A block of a decode node": _diagram(tables.DECODE_BLOCK_STEPS, tables.BlockState.FREE),
        "A block of a prefill node": _diagram(tables.PREFILL_BLOCK_STEPS, tables.BlockState.FREE),
    }
    return "\n\n".join(f"{title}:\n\n{diagram}" for title, diagram in parts.items())


PARTS: Mapping[str, Callable[[], str]] = {"settings": settings_table, "states": state_diagrams}


def fill(text: str, name: str) -> str:
    """``text`` with the generated parts between its markers brought up to date. ``name`` is the document's.

    Raises:
        DocsError: a marker without its partner.
    """
    for part, generate in PARTS.items():
        start, end = f"<!-- {part} -->", f"<!-- /{part} -->"
        if (text.count(start), text.count(end)) not in ((0, 0), (1, 1)):
            raise DocsError(f"{name}: `{start}` and `{end}` must stand there once each, or not at all")
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        replacement = f"{start}\n{generate()}\n{end}"
        text = pattern.sub(lambda _, new=replacement: new, text)  # type: ignore[misc]
    return text


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Update the documents under ``root``, or check them. Returns 1 when a check failed or the markers are wrong."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the documentation.")
    parser.add_argument("--check", action="store_true", help="Only say which documents are out of date.")
    check = parser.parse_args(argv).check
    stale = []
    for document in [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md"))]:
        name, old = str(document.relative_to(root)), document.read_text()
        try:
            new = fill(old, name)
        except DocsError as error:
            print(error, file=sys.stderr)
            return 1
        if new != old:
            stale.append(name)
            if not check:
                document.write_text(new)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


def _default(value: object) -> str:
    if value == "":
        return "(empty)"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{value}`"


def _diagram(steps: Mapping[_State, frozenset[_State]], first: _State) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for old, after in steps.items():
        lines += [f"    {old} --> {new}" for new in sorted(after)]
        if not after:
            lines.append(f"    {old} --> [*]")
    return "\n".join([*lines, "```"])


if __name__ == "__main__":
    sys.exit(main())
