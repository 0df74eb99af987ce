"""docs/faults.md: each case once, with a rule and with tests that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "faults.md"
CASES = range(1, 58)
LEVELS = {"model", "sim", "contract", "api", "part", "process"}
TEST = re.compile(r"(?P<level>\w+) `(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)`")
OTHER_WORDS = re.compile(r"^process, not yet shown: \w.*\.$|\bwaits? for\b|\bdoes not exist\b")
"""What may stand beside tests: what only real processes can show, or the capability that a case waits for."""


@dataclass(frozen=True)
class Case:
    number: int
    fault: str
    rule: str
    shown_by: tuple[str, ...]


def read_cases(text: str) -> list[Case]:
    """The rows of all tables whose first cell is a number."""
    cases = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].isdecimal():
            number, fault, rule, shown_by = cells
            cases.append(Case(int(number), fault, rule, tuple(shown_by.split("<br>"))))
    return cases


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file, read without importing it."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text()).body
    return frozenset(one.name for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"))


def problems(case: Case) -> list[str]:
    """What is wrong with a row; nothing, if it is as it must be."""
    found = [name for name, cell in (("fault", case.fault), ("rule", case.rule)) if not cell.endswith((".", ")"))]
    tests = 0
    for entry in case.shown_by:
        named = TEST.fullmatch(entry)
        if named is None:
            found += [] if OTHER_WORDS.search(entry) else [f"neither a test nor a reason: {entry}"]
            continue
        tests += 1
        if named["level"] not in LEVELS:
            found.append(f"no level: {named['level']}")
        if named["name"] not in names_in(named["file"]):
            found.append(f"no such test: {named['file']}::{named['name']}")
    return found if tests else [*found, "no test"]


def test_each_case_stands_there_once() -> None:
    assert Counter(case.number for case in read_cases(DOCUMENT.read_text())) == Counter(CASES)


@pytest.mark.parametrize("number", CASES)
def test_a_case_has_a_rule_and_tests_that_exist(number: int) -> None:
    (case,) = [case for case in read_cases(DOCUMENT.read_text()) if case.number == number]
    assert problems(case) == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| 1 | F. | | model `tests/unit/test_docs_faults.py::test_each_case_stands_there_once` |", "rule"),
        ("| 1 | F. | R. | model `tests/unit/test_docs_faults.py::test_that_was_renamed` |", "no such test"),
        ("| 1 | F. | R. | model `tests/unit/test_gone.py::test_each_case_stands_there_once` |", "no such test"),
        ("| 1 | F. | R. | unit `tests/unit/test_docs_faults.py::test_each_case_stands_there_once` |", "no level"),
        ("| 1 | F. | R. | seen by hand |", "neither a test nor a reason"),
        ("| 1 | F. | R. | process, not yet shown: a kill. |", "no test"),
    ],
)
def test_what_is_wrong_with_a_row_is_noticed(row: str, problem: str) -> None:
    (case,) = read_cases(row)
    assert any(one.startswith(problem) for one in problems(case)), problems(case)
