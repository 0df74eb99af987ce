"""Runs tests in throw-away copies of the tree, and judges what came of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import MappingProxyType

from tests.mutants.mutant import Mutant, NoLongerApplies
from tests.mutants.report_plugin import RESULTS

COPIED = ("app", "workers", "web", "tests", "celery_config.py", "pyproject.toml")
"""What the tests need of the tree."""
VIOLATIONS = frozenset({"AssertionError", "Failed", "IllegalStep", "Violation"})
"""How a test says that a promise is broken: an assertion, ``pytest.fail`` (so does ``pytest.raises``), or a step that
is in no state table. Any other exception only says that the mutant is no program."""
PLUGINS = ("no:cacheprovider", "pytest_timeout", "tests.mutants.report_plugin")
"""All others stay away: importing them takes longer than most of the tests."""
TEST_LIMIT_S = 60
RUN_LIMIT_S = 300


class Verdict(StrEnum):
    RED = "red"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one test."""

    test: str
    outcome: str
    raised: frozenset[str]
    message: str

    @property
    def timed_out(self) -> bool:
        return self.message.startswith("Failed: Timeout")

    def violates(self, also: Iterable[str] = ()) -> bool:
        """Whether it failed because a promise is broken; ``also``: exceptions that say so in this test."""
        return self.outcome == "failed" and bool(self.raised & VIOLATIONS.union(also)) and not self.timed_out

    def is_of(self, kind: str) -> bool:
        """Whether ``kind`` is among the test's parameters."""
        return kind in self.test.partition("[")[2].rstrip("]").split("-")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest."""

    results: tuple[Result, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of one mutant."""

    mutant: Mutant
    verdict: Verdict
    files: tuple[str, ...] = ()
    red: tuple[str, ...] = ()
    """Tests that noticed."""
    why: str = ""
    """What the first of them said, or why it is not the verdict that is wanted."""
    seconds: float = 0.0
    simulated: str = ""
    """The first seed of the simulation that noticed too, if it was asked and one did."""


@dataclass(slots=True)
class Bench:
    """A copy of the tree as it was at the beginning, from which each mutant gets its own."""

    folder: Path
    clean: Path
    not_green: dict[str, str] = field(default_factory=dict)
    """Selected tests that are not green without any mutant, and why."""

    def prove_green(self, tests: Iterable[str]) -> None:
        """Run ``tests``, all of one file, without a mutant."""
        wanted = sorted(set(tests))
        run = run_tests(self.clean, wanted, self.folder)
        for test in wanted:
            its = [result for result in run.results if belongs(result.test, test)]
            bad = [result for result in its if result.outcome != "passed"]
            if bad or not its:
                self.not_green[test] = bad[0].message if bad else run.output[-500:]

    def judge(self, mutant: Mutant, seeds: int = 0) -> Judgement:
        """Take the guard away in a fresh copy, and see whether its tests notice, and ``seeds`` of the simulation."""
        began = time.monotonic()
        tree = Path(mkdtemp(prefix=f"{mutant.name}-", dir=self.folder))
        try:
            mutant.check(self.clean)
            for test in set(mutant.tests) & self.not_green.keys():
                why = f"{test} is not green without the mutant: {self.not_green[test]}"
                return Judgement(mutant, Verdict.BROKEN, why=why)
            copy_tree(self.clean, tree, link=True)
            files = tuple(dict.fromkeys(mutant.apply(tree)))
            run = run_tests(tree, mutant.tests, self.folder, first_only=not mutant.kinds)
            simulated = run_python(tree, ["-m", "tests.mutants.seeds", str(seeds)]) if seeds else ""
        except NoLongerApplies as error:
            return Judgement(mutant, Verdict.BROKEN, why=str(error))
        finally:
            shutil.rmtree(tree)
        verdict, red, why = decide(mutant, run)
        return Judgement(mutant, verdict, files, red, why, time.monotonic() - began, simulated)


@contextmanager
def bench(root: Path) -> Iterator[Bench]:
    """A bench for the tree at ``root``, which may change meanwhile. Leaves nothing behind."""
    with TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        clean = Path(folder) / "clean"
        clean.mkdir()
        copy_tree(root, clean)
        yield Bench(Path(folder), clean)


def decide(mutant: Mutant, run: Run) -> tuple[Verdict, tuple[str, ...], str]:
    """The verdict, the tests that noticed, and why."""
    failed = [result for result in run.results if result.outcome in ("failed", "uncollected")]
    red = [result for result in failed if result.violates(mutant.also)]
    chosen = [next((each for each in red if each.is_of(kind)), None) for kind in mutant.kinds] or red[:1]
    names = tuple(result.test for result in chosen if result)
    if names and None not in chosen:
        return Verdict.RED, names, red[0].message
    crashed = [result for result in failed if not result.violates(mutant.also)]
    if crashed:
        return Verdict.BROKEN, names, f"{crashed[0].test} ended with {crashed[0].message}"
    if not run.results:
        return Verdict.BROKEN, names, f"no test ran: {run.output[-500:]}"
    unseen = [kind for kind in mutant.kinds if not any(result.is_of(kind) for result in red)]
    return Verdict.SURVIVED, names, f"all green with {', '.join(unseen)}" if names else "all its tests are green"


def run_tests(tree: Path, tests: Iterable[str], folder: Path, *, first_only: bool = False) -> Run:
    """Run pytest on what lies in ``tree``; what the tests write goes to ``folder``, until this returns."""
    with TemporaryDirectory(prefix="run-", dir=folder, ignore_cleanup_errors=True) as scratch:
        results = Path(scratch) / "results.jsonl"
        results.touch()
        options = ["-q", f"--timeout={TEST_LIMIT_S}", f"--basetemp={scratch}/tmp", *(["-x"] if first_only else [])]
        options += [option for plugin in PLUGINS for option in ("-p", plugin)]
        output = run_python(tree, ["-m", "pytest", *options, *tests], {RESULTS: str(results)})
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    return Run(
        tuple(Result(line["test"], line["outcome"], frozenset(line["raised"]), line["message"]) for line in lines),
        output,
    )


def run_python(tree: Path, arguments: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run Python on what lies in ``tree``, and not on what is installed; returns what it said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not over after {RUN_LIMIT_S} s"
    return done.stdout


def copy_tree(source: Path, target: Path, *, link: bool = False) -> None:
    """Copy what the tests need. Linked files are as good as copies as long as they are replaced, never rewritten."""
    copy = os.link if link else shutil.copy2
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=copy)
        elif (source / name).exists():
            copy(source / name, target / name)


def belongs(ran: str, selected: str) -> bool:
    """Whether the test that ran is the selected one, or one of its parameters."""
    return ran == selected or ran.startswith((f"{selected}[", f"{selected}::"))
