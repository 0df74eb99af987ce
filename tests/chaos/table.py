"""What the cells measured, as a table."""

from __future__ import annotations

from dataclasses import astuple, dataclass

HEAD = ("fault", "step", "node", "decided ms", "next token ms", "attempts more", "outcome")


@dataclass(frozen=True)
class Row:
    fault: str
    step: str
    node: str
    decided_ms: int
    """From the fault until the request's fate is decided."""
    next_token_ms: int
    """From there until the client has its next token, or the end."""
    attempts: int
    outcome: str


ROWS: list[Row] = []
NOTES: list[str] = []
"""What else was measured."""


def lines() -> list[str]:
    """The table, and the longest times of each fault."""
    if not ROWS:
        return NOTES
    table = [HEAD, *(tuple(str(value) for value in astuple(row)) for row in ROWS)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEAD))]
    text = ["  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip() for line in table]
    for fault in dict.fromkeys(row.fault for row in ROWS):
        rows = [row for row in ROWS if row.fault == fault]
        decided, token = max(row.decided_ms for row in rows), max(row.next_token_ms for row in rows)
        text.append(f"{fault}: {len(rows)} cells, decided within {decided} ms, next token within {token} ms more")
    return text + NOTES
