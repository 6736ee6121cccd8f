"""Tables of what `chaos.py` does, in docs/reliability.md, and of what it measured, which plot_results.py writes.

python benchmarks/chaos_table.py        # the cases into docs/reliability.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from chaos_list import CASES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
MARKS = "<!-- {0}: made by benchmarks/chaos_table.py -->", "<!-- {0}: end -->"
HEAD = (
    "| what happens | failed / refused / complete | wrong tokens | longest stall, before and from the fault on "
    "| speed during, after | accepted again after | pages leaked | services alive |"
)

Figures = Mapping[str, float]


def read(report: Mapping[str, object]) -> dict[str, dict[str, float]]:
    """Figures of each case, by its name."""
    found: dict[str, dict[str, float]] = {}
    rows = report["rows"]
    for row in rows if isinstance(rows, list) else []:
        match = re.search(r" chaos (\w+)", row["case"])
        if match:
            found.setdefault(match[1], {})[row["metric"]] = row["value"]
    return found


def table(cases: Mapping[str, Figures]) -> str:
    """A line a case, and what users see."""
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for name, case in CASES.items():
        if name in cases:
            lines.append(_line(case.title, cases[name]))
    return "\n".join(lines)


def described() -> str:
    """What users see in each case."""
    lines = ["| case | what happens | what users see |", "|---|---|---|"]
    lines += [f"| `{name}` | {case.title} | {case.seen} |" for name, case in CASES.items()]
    return "\n".join(lines)


def put(text: str, name: str, made: str) -> str:
    """A page's text with something else between its marks of this name."""
    begin, end = (mark.format(name) for mark in MARKS)
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"


def write(page: Path = PAGE) -> None:
    """Put the cases into the page."""
    page.write_text(put(page.read_text("utf-8"), "cases", described()), encoding="utf-8")


def _line(title: str, one: Figures) -> str:
    recovery = f"{one['recovery_ms'] / 1000:.1f} s" if "recovery_ms" in one else "never"
    cells = [
        title,
        f"{one['failed']:g} / {one['refused']:g} / {one['complete']:g}",
        f"{one['wrong_tokens']:g}",
        f"{one['stall_before_ms']:.0f}, {one['stall_ms']:.0f} ms",
        f"{one['during_over_before']:.0%}, {one['after_over_before']:.0%}",
        recovery,
        f"{one['pages_leaked']:g}",
        f"{one['processes_alive']:g}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(write())
