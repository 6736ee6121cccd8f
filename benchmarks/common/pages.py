"""Metrics pages and the costs of processes, read before and after a run."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

import psutil

from outrider.metrics_page import Histogram, Page

__all__ = ["Cost", "Histogram", "Page", "cost_of", "gpu_memory"]


@dataclass(frozen=True)
class Cost:
    """What a service's processes, all together, have used by now."""

    cpu_seconds: float
    resident_mib: float
    gpu_mib: float
    """Memory that they hold on GPUs; 0 where there is none, or where the driver does not tell."""


def cost_of(pid: int) -> Cost:
    """Of a process and all its descendants."""
    family = psutil.Process(pid)
    members = [family, *family.children(recursive=True)]
    cpu = resident = 0.0
    for member in members:
        # One may end between being listed and being asked.
        try:
            cpu += sum(member.cpu_times()[:2])
            resident += member.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    on_gpu = gpu_memory()
    return Cost(cpu, resident, sum(on_gpu.get(member.pid, 0.0) for member in members))


def gpu_memory() -> dict[int, float]:
    """MiB on all GPUs by process id; empty without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    found: dict[int, float] = {}
    for line in done.stdout.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdecimal() and used.strip().isdecimal():
            found[int(pid)] = found.get(int(pid), 0.0) + float(used)
    return found
