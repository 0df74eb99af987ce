"""Rounds in which everything is measured once, and the ratios that come of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """One thing to measure of several subjects: ``measure(subject)`` gives more for better, e.g. tokens per second."""

    name: str
    unit: str
    seen: dict[str, list[float]] = field(default_factory=dict)

    def add(self, subject: str, value: float) -> None:
        self.seen.setdefault(subject, []).append(value)

    def median(self, subject: str) -> float:
        return statistics.median(self.seen[subject])

    def ratio(self, subject: str, to: str) -> float:
        """Median of the ratios of the same rounds: what slowed a round down slowed both."""
        return statistics.median(a / b for a, b in zip(self.seen[subject], self.seen[to], strict=True))


def run_rounds(
    rows: Sequence[Row],
    subjects: Sequence[str],
    measure: Callable[[Row, str], float],
    rounds: int,
    say: Callable[[str], None],
) -> None:
    """Measure each row of each subject once a round. Who comes first changes from round to round."""
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        order = [*subjects[number % len(subjects) :], *subjects[: number % len(subjects)]]
        for row in rows:
            for subject in order:
                row.add(subject, measure(row, subject))


def table(rows: Sequence[Row], ours: str, others: Sequence[str]) -> str:
    """Our medians, and for each of the others its median and how many times as good we are."""
    head = ["", ours, *(f"{other}" for other in others)]
    body = [
        [
            f"{row.name} ({row.unit})",
            f"{row.median(ours):.1f}",
            *(f"{row.median(other):.1f}  {row.ratio(ours, other):.2f}x" for other in others),
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    lines = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in [head, *body]]
    return "\n".join("  ".join(line) for line in lines)
