"""The verdicts themselves, on a toy tree: who notices, who does not, and what counts as neither."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import report_plugin
from tests.mutants.mutant import Edit, Mutant
from tests.mutants.trial import Bench, Verdict, bench

GUARDS = """
def positive(x):
    return x > 0

def even(x):
    return x % 2 == 0
"""
TESTS = """
import pytest
from app.guards import even, positive

def test_positive():
    assert positive(1) and not positive(0)

def test_raises():
    with pytest.raises(ZeroDivisionError):
        1 / even(1)

@pytest.mark.parametrize("kind", ["twin", "valkey"])
def test_kinds(kind):
    assert positive(1 if kind == "twin" else 0) == (kind == "twin")

def test_red_anyway():
    assert False
"""
FILE = "tests/test_toy.py::"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("toy")
    for name, text in {"app/__init__.py": "", "app/guards.py": GUARDS, "tests/test_toy.py": TESTS}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "tests/mutants").mkdir()
    shutil.copy(str(report_plugin.__file__), root / "tests/mutants")
    with bench(root) as made:
        made.prove_green(f"{FILE}{test}" for test in ("test_positive", "test_raises", "test_kinds", "test_red_anyway"))
        yield made


def mutant(old: str, new: str, test: str, kinds: tuple[str, ...] = ()) -> Mutant:
    return Mutant("toy", "a promise", (Edit("app/*.py", old, new),), (f"{FILE}{test}",), kinds)


def test_a_guard_that_a_test_misses_is_red_and_the_tree_it_came_from_is_untouched(toy: Bench) -> None:
    judgement = toy.judge(mutant("return x > 0", "return True", "test_positive"))
    assert (judgement.verdict, judgement.files) == (Verdict.RED, ("app/guards.py",))
    assert judgement.red == (f"{FILE}test_positive",)
    assert (toy.clean / "app/guards.py").read_text() == GUARDS


def test_an_expected_error_that_does_not_come_is_red(toy: Bench) -> None:
    assert toy.judge(mutant("x % 2 == 0", "True", "test_raises")).verdict is Verdict.RED


def test_a_guard_that_no_selected_test_misses_survives(toy: Bench) -> None:
    assert toy.judge(mutant("x % 2 == 0", "True", "test_positive")).verdict is Verdict.SURVIVED


def test_a_guard_that_exists_twice_must_be_missed_twice(toy: Bench) -> None:
    both = ("twin", "valkey")
    judgement = toy.judge(mutant("return x > 0", "return True", "test_kinds", both))
    assert (judgement.verdict, judgement.why) == (Verdict.SURVIVED, "all green with twin")
    assert toy.judge(mutant("return x > 0", "return x <= 0", "test_kinds", both)).verdict is Verdict.RED


@pytest.mark.parametrize(
    ("old", "new", "test", "why"),
    [
        ("return x > 0", "return y > 0", "test_positive", "NameError"),
        ("return x > 0", "return x >", "test_positive", "SyntaxError"),
        ("return x > 1", "return True", "test_positive", "no longer applies to app/*.py: its anchor 'return x > 1'"),
        ("return", "return not", "test_positive", "stands there 2 times"),
        ("return x > 0", "return True", "test_red_anyway", "not green without the mutant"),
        ("return x > 0", "return True", "test_gone", "there is no test"),
    ],
)
def test_what_is_no_program_or_proves_nothing_is_broken(toy: Bench, old: str, new: str, test: str, why: str) -> None:
    judgement = toy.judge(mutant(old, new, test))
    assert judgement.verdict is Verdict.BROKEN
    assert why in judgement.why


def test_an_anchor_may_be_laid_out_in_another_way(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("if (\n    a\n    and b\n):\n    pass\n")
    Edit("*.py", "a and b", "a").apply(tmp_path)
    assert (tmp_path / "file.py").read_text() == "if (\n    a\n):\n    pass\n"
