"""Run a program that the kernel kills when its parent ends: ``parent_death.py PARENT_PID PROGRAM ARGUMENT…``.

``baton up`` starts each child through this file. Linux then ends the children of a launcher that was killed with -9,
which no handler of the launcher itself could do. The kernel watches the *thread* that spawned the child, so the
launcher spawns from its main thread. The setting survives exec, and a new session.

It is run by path, without site-packages: it starts in about 15 ms and imports nothing of Baton.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(argv: list[str]) -> None:
    """Replace this process by the program. Exits with 1 when that cannot be done, or the parent is gone already."""
    parent, program = int(argv[1]), argv[2]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"cannot tie {program} to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the setting was made: nobody would ever send the signal
        sys.exit(f"the process that wanted {program} has ended")
    try:
        os.execv(program, argv[2:])  # noqa: S606 (no shell is wanted)
    except OSError as error:
        sys.exit(f"cannot run {program}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv)
