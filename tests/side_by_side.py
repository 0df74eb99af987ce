"""`make test`: the suites that only compute, in a second pytest beside the one that drives real processes.

    python -m tests.side_by_side [options of pytest]

Servers that start, deadlines of networks and bounds on recovery leave processors idle for much of their time. The
second pytest takes that, at a lower priority, so that no bound is missed because of it; what it prints follows when the
first one has ended. Options go to both, and the status is 0 when neither has failed. Where paths are named, or an
option that two of them could not share, it is one ordinary pytest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import pytest

ROOT = Path(__file__).parents[1]
NOT_TESTED = ("tests/bench",)
COMPUTING = (
    "tests/model",
    "tests/mutants",
    "tests/search",
    "tests/sim",
    "tests/unit/engine",
    "tests/unit/model",
    "tests/unit/protocol",
)
"""They wait for no clock but their own: a real server's records run out however late a test comes to read them. A new
folder belongs to the others until it stands here."""
ALONE = ("--junit", "--pdb", "--trace", "-s", "--capture=no")
"""Options that name one file or want one terminal."""
NICE = 10
TIMEOUT_S = 600
"""For one test of those that get what the others leave over."""


def suites() -> list[str]:
    """Every folder and test file below ``tests``; of unit tests, every one below those."""
    found = [path for folder in ("tests", "tests/unit") for path in (ROOT / folder).iterdir()]
    names = [str(path.relative_to(ROOT)) for path in found if path.is_dir() or path.match("test_*.py")]
    return sorted(name for name in names if name != "tests/unit")


def ignoring(*names: str) -> list[str]:
    return [f"--ignore={name}" for name in names]


def driving_only() -> list[str]:
    return ignoring(*NOT_TESTED, *COMPUTING)


def computing_only() -> list[str]:
    return ignoring(*(name for name in suites() if name not in COMPUTING))


def wants_one(arguments: list[str]) -> bool:
    names_paths = any(Path(argument.split("::")[0]).exists() for argument in arguments)
    return names_paths or any(argument.startswith(ALONE) for argument in arguments)


class Both:
    """The two of them; a signal to this process ends both as Ctrl-C ends one."""

    def __init__(self, arguments: list[str], output: BinaryIO) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._interrupt)
        color = ["--color=yes"] if sys.stdout.isatty() else []
        computing = [*computing_only(), f"--timeout={TIMEOUT_S}", *color, *arguments]
        self.driving = self._start([*driving_only(), *arguments])
        self.computing = self._start(computing, output, NICE)

    def _start(self, arguments: list[str], output: BinaryIO | None = None, nice: int = 0) -> subprocess.Popen[bytes]:
        """In a process group of its own: Ctrl-C would reach it twice otherwise, and the second ends its cleaning up."""
        command = ["nice", "-n", str(nice), sys.executable, "-m", "pytest", *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
        self._started.append(process)
        return process

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """As a terminal does it: what they have started hears it too."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)


def follow(process: subprocess.Popen[bytes], path: Path) -> None:
    """Print what is and will be written there until the process has ended."""
    with path.open("rb") as written:
        ended = False
        while not ended:
            ended = has_ended(process, within_s=0.2)
            sys.stdout.buffer.write(written.read())
            sys.stdout.flush()


def has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def status(codes: list[int]) -> int:
    """Options may leave one of them without tests, but not both."""
    failed = [code for code in codes if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)]
    return failed[0] if failed else min(codes)


def main(arguments: list[str]) -> int:
    if wants_one(arguments):
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *ignoring(*NOT_TESTED), *arguments])
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.NamedTemporaryFile(prefix="baton-tests-"))
        both = Both(arguments, output.file)
        first = both.driving.wait()
        print("==> Tests that only compute, which ran beside these", flush=True)
        follow(both.computing, Path(output.name))
        return status([first, both.computing.wait()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
