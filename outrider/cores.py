"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that the process may run on, and no more than a container's quota of processor time pays for.

    Threads beyond a quota take it from those that work: the kernel stops all of them when it is spent.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, round(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time in each period (cgroup v2's cpu.max, v1's cpu.cfs_quota_us); None without a limit."""
    try:
        if (v2 := cgroup / "cpu.max").exists():
            most, period = v2.read_text().split()
        else:
            most, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(most) / float(period) if float(most) > 0 else None
    except (OSError, ValueError):
        return None
