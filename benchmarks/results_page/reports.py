"""Read reports in benchmarks/results and write their figures as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from outrider_tools.bench.report import Row

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Cells = Sequence[str]

_MOVED = {
    "attention_backends": "kernels.attention_backends",
    "chaos": "chaos",
    "compose_processes": "serving.compose_processes",
    "deterministic": "serving.deterministic",
    "draft_step": "split.draft_step",
    "engine": "engine",
    "gateway_host": "serving.gateway_host",
    "host_gap": "engine.host_gap",
    "live": "serving.live",
    "load": "serving.load",
    "services": "serving.services",
    "soak": "serving.soak",
    "split": "split",
}
"""Former scripts of benchmarks/, each with the name of its present module."""


class ResultFile:
    """A file of benchmarks/results."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        self._values = {(row["case"], row["metric"]): float(row["value"]) for row in self.data.get("rows", [])}

    def __call__(self, case: str, metric: str = "tokens_per_second") -> float:
        """Return a row's value; raises KeyError if there is no such row."""
        return self._values[case, metric]

    def cell(self, case: str, metric: str, form: str = ".2f") -> str:
        """Return a row's value as text; raises KeyError if there is no such row."""
        return format(self(case, metric), form)

    def __contains__(self, row: tuple[str, str]) -> bool:
        """Whether there is a row of this case and metric."""
        return row in self._values

    @property
    def rows(self) -> list[Row]:
        """All rows."""
        return [Row(**row) for row in self.data["rows"]]

    @property
    def device(self) -> str:
        """The device of the measurement."""
        first, *others = str(self.data["device"]).replace("2x ", "2 x ").split(" + ")
        return f"{1 + len(others)} x {first}" if others else first

    @property
    def date(self) -> str:
        """The day of the measurement, as YYYY-MM-DD."""
        return str(self.data["date"])[:10]

    @property
    def link(self) -> str:
        """A link to the file from a page in docs."""
        return f"[{self.name}.json](../benchmarks/results/{self.name}.json)"

    def source(self, command: str = "command") -> str:
        """Return a line with device, date, commit and file, and the folded command of field `command`."""
        commit = str(self.data["commit"]).split()[0][:9]
        return f"{self.device}, {self.date}, commit {commit}, {self.link}:\n\n{_folded(self.data[command])}"


report = cache(ResultFile)


def table(head: Cells, lines: Iterable[Cells]) -> str:
    """Return a Markdown table."""
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def targets(rows: Iterable[tuple[str, str, float, Sequence[tuple[str, float]]]]) -> str:
    """Return a table of targets and measurements. A row is (what, comparison, target, measured values with names)."""
    lines = []
    for what, comparison, target, values in rows:
        met = [value <= target if comparison == "at most" else value >= target for _, value in values]
        shown = [f"{name} {_number(value)}".strip() for name, value in values]
        verdicts = ["met" if one else "**missed**" for one in met]
        verdict = verdicts[0] if len(set(met)) == 1 else ", ".join(verdicts)
        lines.append((what, f"{comparison} {target:g}", ", ".join(shown), verdict))
    return table(("what", "target", "measured", ""), lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _today(command: str) -> str:
    """Return a command of an older commit as it is run now. Of values separated by bars the first is kept."""
    command = re.sub(r"^python3\b", "python", command)
    command = re.sub(r"benchmarks/(\w+)\.py", lambda script: f"-m benchmarks.{_MOVED[script[1]]}", command)
    # Cases of an option that no longer exists; no table shows them.
    command = re.sub(r" \S+,patience=\S+", "", command)
    return re.sub(r"(\w)\|\S+| \(.*\)$", r"\1", command)


def _words(command: str) -> Iterable[str]:
    """Split a command into words, with an option and its first value as one word."""
    found: list[str] = []
    for word in re.findall(r"'[^']*'|[^\s']+", command):
        if found and found[-1].startswith("--") and "=" not in found[-1] and " " not in found[-1] and word[0] != "-":
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _folded(command: str) -> str:
    """Return a command as a folded block of Markdown."""
    lines: list[str] = []
    for word in _words(_today(command)):
        if lines and len(lines[-1]) + len(word) < 110:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}" if lines else word)
    text = " \\\n".join(lines)
    return f"<details><summary>command</summary>\n\n```console\n{text}\n```\n\n</details>"
