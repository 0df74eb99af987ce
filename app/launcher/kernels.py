"""Has the compiled kernels built, in a process of its own: nothing here needs Paddle, or knows the workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from app.errors import StartupError
from app.launcher.plan import SOURCE_ROOT, child_environment
from app.settings import Settings

PROGRESS = "progress: "
RESULT = "kernels: "
ERROR = "error: "


def build_kernels(settings: Settings, say: Callable[[str], None]) -> str:
    """Build what BATON_KERNELS asks for, unless the cache has it; pass on how that goes, warnings too.

    Returns:
        Where the library is; empty: workers compute in pure Paddle.

    Raises:
        StartupError: BATON_KERNELS is "compiled", and it cannot be had.
    """
    command = [sys.executable, "-m", "workers.engine.kernels.build"]
    environment = child_environment(os.environ, settings)
    library, error = "", "the process that builds the kernels said nothing"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=SOURCE_ROOT) as child:
        for line in map(str.rstrip, child.stdout or ()):
            if line.startswith(PROGRESS):
                say(line.removeprefix(PROGRESS))
            library = line.removeprefix(RESULT) if line.startswith(RESULT) else library
            error = line.removeprefix(ERROR) if line.startswith(ERROR) else error
    if child.returncode:
        raise StartupError(error)
    return library
