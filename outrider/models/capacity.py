"""Capacity for a model's work: memory of a GPU or machine, cores, and the sizes that work is padded to. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
GIB = 2**30
CONTEXT_BYTES = GIB // 2
"""Memory that CUDA takes for a process before anything else; we have seen 0.3 to 0.7 GiB."""
DRAFT_ROWS, DRAFT_REGION, DRAFT_WORK_BYTES = 64, 768, 256 << 20
"""Requests, and tree slots of each, that a draft service on a GPU makes room for, and the memory it keeps for graphs
and for what a forward needs beside its logits."""
ROUND_REGION = 256
"""Tree slots of a request if a draft model runs inside verify's rounds."""
SCRATCH_BYTES = 16
"""Bytes for each token slot and vocabulary entry: logits, processed logits, sampling tables."""
_MAX_CPU_TOKENS, _CPU_SHARE = 65536, 0.25
_UNPLANNED_SHARE = 0.01
"""The share of a GPU's memory left to everything that no plan knows of."""
TOKEN_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Buckets for the tokens of a round."""


def memory_room(free: int, total: int, own: int, share: float) -> int:
    """Return how many more bytes a process may take of a GPU's memory, of which it may have `share` in all.

    Memory of other processes counts only if it leaves less than that. `own` is what torch has reserved for this
    process; its context comes on top.
    """
    return min(int(total * share) - own - CONTEXT_BYTES, free - int(total * _UNPLANNED_SHARE))


def cpu_tokens(token_bytes: int, num_processes: int = 1) -> int:
    """Return how many tokens' KV fits a process's share of a quarter of the free memory, within what a CPU can use."""
    return max(min(int(free_memory() * _CPU_SHARE / num_processes) // token_bytes, _MAX_CPU_TOKENS), 1024)


def free_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes that are free on the machine, but no more than a container's limit leaves.

    Pages of files count as free: the kernel drops them first, and a model's files alone may fill most of the memory.
    """
    # Imported here: doors do not need it.
    import psutil

    free: int = psutil.virtual_memory().available
    left = _left_in(cgroup)
    return free if left is None else max(0, min(free, left))


def _left_in(cgroup: Path) -> int | None:
    """Return a container's memory limit less what it uses (cgroup v2's memory.max, v1's limit_in_bytes); else None.

    File pages that were not read again count as free: cgroups count them as used, but the kernel drops them first.
    """
    try:
        if (cgroup / "memory.max").exists():
            folder, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        else:
            folder, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (int((folder / name).read_text()) for name in names[:2])
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - max(0, used - int(stat.get(names[2], 0)))
    except (OSError, ValueError):  # "max" is no limit
        return None


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Return how many cores the process may use, but no more than a container's quota of processor time pays for.

    Threads beyond the quota take time from those that work: the kernel stops all threads when the quota is spent.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, round(quota)))


def _quota(cgroup: Path) -> float | None:
    """Return the quota in cores (cgroup v2's cpu.max, v1's cpu.cfs_quota_us); None without a limit."""
    try:
        if (v2 := cgroup / "cpu.max").exists():
            most, period = v2.read_text().split()
        else:
            most, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(most) / float(period) if float(most) > 0 else None
    except (OSError, ValueError):
        return None


def width_buckets(widths: Sequence[int], max_width: int) -> list[int]:
    """Return those of the rising `widths` that are below `max_width`, and `max_width` at the end."""
    return [width for width in widths if width < max_width] + [max_width]


def row_buckets(max_rows: int) -> list[int]:
    """Return 1, 2, 4, ... below `max_rows`, and `max_rows` at the end."""
    return [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows] + [max_rows]
