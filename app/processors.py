"""How many processors this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def available_processors() -> int:
    """Those it may run on, or fewer if its control group gets less time: more threads would only be held up."""
    count = len(os.sched_getaffinity(0))
    quota = _quota()
    return count if quota is None else max(1, min(count, int(quota)))


def _quota() -> float | None:
    """Processors' worth of time that the control group gets (v2: cpu.max, v1: cfs_quota_us); None: no limit."""
    try:
        if _QUOTA_V2.exists():
            quota, period = _QUOTA_V2.read_text().split()
        else:
            quota, period = _QUOTA_V1.read_text().strip(), _PERIOD_V1.read_text().strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None
