"""Draws what benchmarks/engine.py measured: round time against tokens, batch and context, with the model of its cost.

python benchmarks/plot.py benchmarks/results/engine_llama-8b.json --out docs/images/engine_llama-8b.png
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from engine_cost import CostModel, Point, round_times
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter
from report import Row

BARE = re.compile(r"bare products \S+ m(\d+) ")


class Figure:
    """The rows of a report, and where they are drawn."""

    def __init__(self, rows: list[Row]) -> None:
        self._gpu = round_times(rows, "round_gpu_ms")
        self._wall = round_times(rows, "round_ms")
        self.model = CostModel.fit(self._gpu.items())
        found = ((BARE.search(row.case), row) for row in rows if row.metric == "gemm_ms")
        self._bare: dict[int, float] = {}
        for match, row in found:
            if match is not None:
                count = int(match[1])
                self._bare[count] = min(row.value, self._bare.get(count, row.value))

    def by_tokens(self, axes: Axes) -> None:
        """One request, one context, more and more tokens of a tree; the bare products below."""
        points = self._select(lambda point: point.num_rows == 1 and point.context == self._context)
        self._draw(axes, points, lambda point: point.num_tokens, "1 request")
        bare = sorted(self._bare.items())
        axes.plot([count for count, _ in bare], [ms for _, ms in bare], "k:", label="bare products")
        self._finish(axes, "tokens in the round", f"batch 1, context {self._context}")

    def by_batch(self, axes: Axes) -> None:
        """Plain decoding of more and more requests, and the same number of tokens spread over them."""
        plain = self._select(lambda point: point.num_rows == point.num_tokens and point.context == self._context)
        self._draw(axes, plain, lambda point: point.num_rows, "1 token each")
        most = max(point.num_tokens for point in self._gpu)
        trees = self._select(lambda point: point.num_tokens == most and point.context == self._context)
        self._draw(axes, trees, lambda point: point.num_rows, f"{most} tokens in all")
        self._finish(axes, "requests", f"context {self._context} each")

    def by_context(self, axes: Axes) -> None:
        """One request with a longer and longer context."""
        for count in sorted({point.num_tokens for point in self._gpu if point.context > self._context}):
            points = self._select(lambda point, count=count: (point.num_rows, point.num_tokens) == (1, count))
            self._draw(axes, points, lambda point: point.context, f"{count} token{'s' * (count > 1)}")
        self._finish(axes, "context", "batch 1")

    @property
    def _context(self) -> int:
        return min(point.context for point in self._gpu)

    def _select(self, wanted: Callable[[Point], bool]) -> list[Point]:
        return [point for point in self._gpu if wanted(point)]

    def _draw(self, axes: Axes, points: list[Point], place: Callable[[Point], int], label: str) -> None:
        points = sorted(points, key=place)
        places = [place(point) for point in points]
        (line,) = axes.plot(places, [self.model(point) for point in points], "-", linewidth=1)
        color = line.get_color()
        axes.plot(places, [self._gpu[point] for point in points], "o", color=color, label=f"{label}, GPU")
        axes.plot(places, [self._wall[point] for point in points], "_", color=color, label=f"{label}, wall")

    def _finish(self, axes: Axes, name: str, title: str) -> None:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.set_xlabel(name)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def main() -> None:
    """Read a report, draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="an image file; its suffix says which kind")
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    drawing = Figure([Row(**row) for row in report["rows"]])
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.2), sharey=False)
    drawing.by_tokens(left)
    drawing.by_batch(middle)
    drawing.by_context(right)
    left.set_ylabel("milliseconds a round")
    title = f"{options.report.stem}: {report['device']}, {report['date'][:10]}, {report['commit']}"
    figure.suptitle(title, fontsize=10)
    text = f"lines: the model of cost, within {drawing.model.worst:.0%} of every round"
    figure.text(0.5, 0.005, text, ha="center", fontsize=9)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
