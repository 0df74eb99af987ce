"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_FILES = (
    ("memory.max", "memory.current"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine has left, or the container if that is less.

    Shared memory beyond it is not refused: the kernel kills processes, and not always the one that asked.
    """
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file in _CGROUP_FILES:
        limit = cgroup / limit_file
        if limit.is_file() and (text := limit.read_text().strip()) != "max":
            available = min(available, max(0, int(text) - int((cgroup / usage_file).read_text())))
    return available
