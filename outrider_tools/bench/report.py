"""Write a benchmark's JSON file, and draw plots of it. Plots need matplotlib, which Outrider does not depend on."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider_tools.files import writing


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `case` is a line of words: model, drafter, mode, bN, mN, ctxNk, dtype, decoding."""

    case: str
    metric: str
    value: float
    unit: str


def write_report(
    path: Path | None,
    benchmark: str,
    device: str,
    rows: Sequence[Row],
    packages: tuple[str, ...],
    *,
    command: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write `rows` to `path` (None: standard output), with what is needed to judge and repeat them.

    `packages` lists the packages whose versions matter. `command` replaces this process's own command line. `more` adds
    fields to the file.
    """
    report = {
        "benchmark": benchmark,
        "device": device,
        "host": cpu_name(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command or [Path(sys.executable).name, *sys.orig_argv[1:]]),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "rows": [asdict(row) for row in rows],
        **(more or {}),
    }
    text = json.dumps(report, indent=1) + "\n"
    if path is None:
        sys.stdout.write(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def cpu_name() -> str:
    """Return the processor's name as the system tells it, with the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {cores} cores"
    return f"{platform.processor() or platform.machine()}, {cores} cores"


def _commit() -> str:
    """Return the commit of the running source checkout or, for an installation, of the current folder."""
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


_LOAD = re.compile(r"\b(b|rate)(\d+(?:\.\d+)?)\b")
_LATENCIES = (("ttft_ms", "time to first token, ms"), ("itl_ms", "between two tokens, ms"))
_WORDS = {"b": "requests at once", "rate": "requests a second"}


def require_matplotlib(path: Path) -> None:
    """Raise ConfigError if matplotlib is missing or cannot write `path`'s format. Call it before a long run."""
    try:
        import_module("matplotlib")
        backends: Any = import_module("matplotlib.backend_bases")
    except ImportError:
        raise ConfigError("--plot: matplotlib is not installed; pip install matplotlib, or leave --plot out") from None
    kinds = sorted(backends.FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in ("", *kinds):
        raise ConfigError(f"--plot: {path}: the kind of image is not known; end it with one of {', '.join(kinds)}")


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw throughput, latencies and acceptance of all points as one image, in the format of `path`'s suffix.

    Raises ConfigError if matplotlib is missing, does not know the suffix, or the file cannot be written.
    """
    require_matplotlib(path)
    points = points_of(rows)
    words = {kind for kind, _, _ in points} or {"b"}
    # Not pyplot, which looks for a display.
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(17, 4))
    axes = figure.subplots(1, 4)
    # Evenly spaced, not to scale: loads mostly double from point to point.
    places = range(len(points))
    loads = [load_text(kind, size, with_kind=len(words) > 1) for kind, size, _ in points]
    axes[0].plot(places, [found.get("tokens_per_second", 0.0) for _, _, found in points], "o-")
    axes[0].set_ylabel("tokens/s")
    for panel, (metric, label) in zip(axes[1:3], _LATENCIES, strict=True):
        for share in ("p50", "p90", "p99"):
            values = [found.get(f"{metric}_{share}", float("nan")) for _, _, found in points]
            panel.plot(places, values, "o-", label=share)
        panel.set_ylabel(label)
        panel.legend(fontsize=8)
    for panel in axes[:3]:
        panel.set_xlabel(", ".join(_WORDS[word] for word in sorted(words)))
        panel.set_xticks(places, loads)
        panel.set_xlim(-0.5, max(len(points), 1) - 0.5)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    _draw_acceptance(axes[3], points)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with writing("--plot", path):
        figure.savefig(path, dpi=130)


def _draw_acceptance(panel: Any, points: Sequence[tuple[str, float, Mapping[str, float]]]) -> None:
    for kind, place, found in points:
        depths = {
            int(name.rpartition("_")[2]): value for name, value in found.items() if name.startswith("accept_rate")
        }
        if depths:
            label = load_text(kind, place, with_kind=True)
            panel.plot(sorted(depths), [depths[depth] for depth in sorted(depths)], ".-", label=label)
            panel.legend(fontsize=8)
    if not panel.lines:
        panel.text(0.5, 0.5, "not told", ha="center", transform=panel.transAxes)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("depth in the tree")
    panel.set_ylabel("rounds that accepted it")
    panel.set_ylim(0, 1)
    panel.grid(alpha=0.3)


def load_text(kind: str, size: float, *, with_kind: bool) -> str:
    """Return the tick label of a load: its size, or "all" if all requests are sent at once."""
    if not size:
        return "all"
    return f"{kind if with_kind else ''}{size:g}"


def points_of(rows: Sequence[Row]) -> list[tuple[str, float, dict[str, float]]]:
    """Return each case's kind of load ("b" or "rate"; the rate if it has both), size of the load, and metrics."""
    by_case: dict[str, dict[str, float]] = {}
    for row in rows:
        by_case.setdefault(row.case, {})[row.metric] = row.value
    points = []
    for case, found in by_case.items():
        loads = {kind: float(value) for kind, value in _LOAD.findall(case)}
        kind = "rate" if "rate" in loads else "b"
        points.append((kind, loads.get(kind, 0.0), found))
    return sorted(points, key=lambda point: (point[0], point[1]))
