"""Each mutant still applies to the code as it is, so that a change of a guard is met here and not hours later."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.inventory import ALL
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]


def test_every_guard_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in ALL).items() if count > 1] == []


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_it_applies_and_what_is_left_is_still_a_program(mutant: Mutant) -> None:
    for path, text in mutant.check(ROOT):
        assert text != path.read_text()
        if path.suffix == ".py":
            ast.parse(text)
