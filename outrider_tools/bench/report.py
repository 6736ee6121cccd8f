"""The one JSON file that a benchmark writes."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `case` is a line of words: model, drafter, mode, bN, mN, ctxNk, dtype, decoding."""

    case: str
    metric: str
    value: float
    unit: str


def write_report(
    path: Path,
    benchmark: str,
    device: str,
    rows: Sequence[Row],
    packages: tuple[str, ...],
    *,
    command: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write `rows` with what is needed to judge and repeat them.

    `packages` are those whose versions matter. `command` replaces this process's own command line; `more` are further
    fields of the file.
    """
    report = {
        "benchmark": benchmark,
        "device": device,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command or [Path(sys.executable).name, *sys.orig_argv[1:]]),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "rows": [asdict(row) for row in rows],
        **(more or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def cpu_name() -> str:
    """The processor's name as the system tells it, with the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {cores} cores"
    return f"{platform.processor() or platform.machine()}, {cores} cores"


def _commit() -> str:
    """Of the source checkout that runs or, for an installation, of the present folder."""
    root = Path(__file__).resolve().parents[2]
    where = root if (root / ".git").exists() else Path.cwd()
    command = ["git", "-C", str(where), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
