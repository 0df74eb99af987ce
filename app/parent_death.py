"""Run a program that the kernel ends when its parent ends: ``parent_death.py PARENT_PID SIGNAL PROGRAM ARGUMENT…``.

``baton up`` starts each child through this file, and the embedded Valkey is started through it. Linux then sends the
signal to the children of a parent that was killed with -9, which no handler of the parent itself could do. The kernel
watches the *thread* that spawned the child: it must live as long as the child is wanted. The setting survives exec, and
a new session. (A ``preexec_fn`` could do the same, and can deadlock in a parent with threads.)

It is run by path, without site-packages: it starts in about 15 ms and imports nothing of Baton.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def tied_to_parent(argv: Sequence[str], signum: signal.Signals) -> list[str]:
    """The command line that runs ``argv`` so that it gets ``signum`` when the calling thread or process ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(signum)), *argv]


def tie_to_parent(parent: int, signum: int) -> None:
    """Have the kernel send this process ``signum`` when its parent ends. Ends it at once if that has happened already.

    For a process that was forked and does not exec.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0):
        sys.exit(f"cannot tie process {os.getpid()} to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the setting was made: nobody would ever send the signal
        sys.exit(f"the parent {parent} of process {os.getpid()} has ended")


def main(argv: list[str]) -> None:
    """Replace this process by the program. Exits with 1 when that cannot be done, or the parent is gone already."""
    parent, signum, program = int(argv[1]), int(argv[2]), argv[3]
    tie_to_parent(parent, signum)
    try:
        os.execv(program, argv[3:])  # noqa: S606 (no shell is wanted)
    except OSError as error:
        sys.exit(f"cannot run {program}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv)
