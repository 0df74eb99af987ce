"""What the tests on real processes share: one cluster with failpoints, and the table of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos import table
from tests.chaos.stack import Stack
from tests.integration.conftest import models, new_home

__all__ = ["models", "new_home"]


@pytest.fixture(scope="session")
def stack(new_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two prefill and two decode workers that take orders."""
    folder = tmp_path_factory.mktemp("chaos")
    cluster = Stack(new_home(folder), folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := table.lines():
        terminalreporter.section("time from fault to recovery")
        for line in lines:
            terminalreporter.write_line(line)
