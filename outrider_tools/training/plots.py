"""Curves of a training as PNG files. matplotlib is not among the dependencies: without it there are no plots."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider_tools.training.report import Report
from outrider_tools.training.tables import decoding

CURVE, DEPTHS = "training.png", "accept_rate.png"
SIZE, DPI = (9.0, 3.6), 110
# Depths that get a line of their own in the curve.
SHOWN_DEPTHS = (1, 2, 4, 6, 8)


def write_plots(record: dict[str, Any], folder: Path, report: Report) -> list[str]:
    """Draw a training's record; returns the files' names, none where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        report.line("no plots: matplotlib is not installed (pip install matplotlib)")
        return []
    names = []
    for name, draw in ((CURVE, _curve), (DEPTHS, _depths)):
        # Not pyplot, which would look for a display.
        figure = import_module("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
        if draw(figure, record):
            figure.savefig(folder / name, dpi=DPI)
            names.append(name)
    return names


def _curve(figure: Any, record: dict[str, Any]) -> bool:
    """Loss, and agreement by depth, over the steps."""
    points = record["training"]["points"]
    if not points:
        return False
    steps = [point["step"] for point in points]
    loss, rates = figure.subplots(1, 2)
    loss.plot(steps, [point["loss"] for point in points])
    loss.set(xlabel="step", ylabel="loss", title="loss")
    for depth in SHOWN_DEPTHS:
        if depth <= len(points[0]["rates"]):
            rates.plot(steps, [point["rates"][depth - 1] for point in points], label=f"depth {depth}")
    rates.set(xlabel="step", ylabel="share of places", title="agreement in training", ylim=(0, None))
    rates.legend()
    for axes in (loss, rates):
        axes.grid(alpha=0.3)
    return True


def _depths(figure: Any, record: dict[str, Any]) -> bool:
    """Accept rates at the end, and how far rounds get."""
    rates, rounds = figure.subplots(1, 2, sharex=True)
    for evaluation in record["evaluation"]:
        found, name = evaluation["all"], decoding(evaluation["temperature"])
        places = range(1, len(found["rates"]) + 1)
        rates.plot(places, found["rates"], marker="o", label=name)
        for kind in ("chain", "tree"):
            reached = found[kind]["reached"]
            rounds.plot(range(1, len(reached) + 1), reached, marker="o", label=f"{name}, {kind}")
    rates.set(xlabel="depth", ylabel="accept rate", title="accept rate, teacher-forced", ylim=(0, None))
    rounds.set(xlabel="depth", ylabel="share of rounds", title="rounds that accept so many", ylim=(0, 1))
    for axes in (rates, rounds):
        axes.grid(alpha=0.3)
        axes.legend()
    return True
