"""A pytest plugin that writes what became of each test, and by which exception, as one JSON line to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RESULTS = "MUTANT_RESULTS"
"""Environment variable: the file to write to."""


def _write(**fields: Any) -> None:
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(fields) + "\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    """The mutated tree must be what is tested, not the one that is installed."""
    import app

    if not Path(str(app.__file__)).is_relative_to(Path.cwd()):
        pytest.exit(f"app is imported from {app.__file__}, not from {Path.cwd()}", 3)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(test=report.nodeid, outcome="uncollected", raised=[], message=str(report.longrepr)[-500:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or not report.passed:
        error = call.excinfo
        raised = [kind.__name__ for kind in error.type.__mro__] if error else []
        message = error.exconly() if error else ""
        _write(test=report.nodeid, outcome=report.outcome, raised=raised, message=message)
    return report
