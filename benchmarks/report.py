"""The one JSON file that a benchmark writes."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `case` is a line of words: model, drafter, mode, bN, mN, ctxNk, dtype, decoding."""

    case: str
    metric: str
    value: float
    unit: str


def write_report(path: Path, benchmark: str, device: str, rows: list[Row], packages: tuple[str, ...]) -> None:
    """Write `rows` with what is needed to judge and repeat them. `packages` are those whose versions matter."""
    report = {
        "benchmark": benchmark,
        "device": device,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def cpu_name() -> str:
    """The processor's name as Linux tells it, with the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {cores} cores"
    return f"{platform.processor() or platform.machine()}, {cores} cores"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
