"""Plots in docs/images, made from the reports in benchmarks/results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.engine.cost import FittedCost, Point, round_times
from benchmarks.results_page.reports import ROOT, ResultFile, report
from benchmarks.results_page.split_tables import (
    CONTEXTS,
    DRAFT_STEPS,
    EAGLE3,
    EAGLE3_16,
    EAGLE3_LOCKSTEP,
    LOCKSTEP,
    PLAIN,
    PLAIN_16,
    SPLIT,
    SPLIT_16,
    STEP_NODES,
)
from benchmarks.results_page.tables import ENGINE, KINDS, MT_BENCH, MT_INSIDE, MT_PLAIN

IMAGES = ROOT / "docs" / "images"


def plot_split() -> Figure:
    """Plot speeds and accept lengths of drafts over the 80 questions at one request, and speeds at sixteen."""
    one = report("split_80_h200x2")
    names = {
        PLAIN: "plain",
        EAGLE3_LOCKSTEP: "EAGLE-3,\nlockstep",
        EAGLE3: "EAGLE-3",
        LOCKSTEP: "135M,\nlockstep",
        SPLIT: "135M",
    }
    figure, (left, middle, right) = _figure(12, 3)
    _bars(left, {title: one(case) for case, title in names.items()}, "one request")
    lengths = {title: one(case, "accept_length") for case, title in names.items()}
    _bars(middle, lengths, "accept length, one request", label="tokens committed a round", form="%.1f")
    _bars(right, {"plain": one(PLAIN_16), "EAGLE-3": one(EAGLE3_16), "135M": one(SPLIT_16)}, "16 requests")
    return _titled(figure, "8B shape, 80 MT-bench questions, greedy", one)


def plot_mt_bench() -> Figure:
    """Plot the default model's speed on a CPU by kind of question."""
    one = report(MT_BENCH)
    figure, (axes,) = _figure(8.4, 1)
    for shift, case, label in ((-0.2, MT_PLAIN, "plain"), (0.2, MT_INSIDE, "EAGLE-3 and n-grams")):
        places = [index + shift for index in range(len(KINDS))]
        axes.bar(places, [one(f"{case} {kind}") for kind in KINDS], 0.4, label=label)
    axes.set_xticks(range(len(KINDS)), KINDS)
    axes.set_xlabel("kind of question")
    axes.set_ylabel("tokens per second")
    axes.legend(fontsize=8)
    return _titled(figure, "SmolLM2-135M-Instruct, 80 MT-bench questions, one request, greedy", one)


def plot_steps() -> Figure:
    """Plot the time of draft steps by nodes."""
    one = report("draft_step_renewed_h200")
    figure, panels = _figure(8.4, 2)
    for axes, (draft, title) in zip(panels, DRAFT_STEPS.items(), strict=True):
        for key, place in {**CONTEXTS, "4k": "4,096"}.items():
            cases = (f"{draft} split b1 m{count} ctx{key} bf16 greedy" for count in STEP_NODES)
            times = [one(case, "draft_step_ms") for case in cases]
            axes.plot(STEP_NODES, times, "o-", label=f"behind {place} tokens")
        axes.set_xticks(STEP_NODES)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("nodes in the step")
        axes.set_ylabel("milliseconds a step")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8)
    return _titled(figure, "draft steps of one request", one)


def plot_engine() -> Figure:
    """Plot the engine's rounds by tokens, batch and context, with the model of their cost."""
    one = report(ENGINE)
    gpu, wall = round_times(one.rows, "round_gpu_ms"), round_times(one.rows, "round_ms")
    model = FittedCost.fit(gpu.items())
    context = min(point.context for point in gpu)
    most = max(point.num_tokens for point in gpu)
    figure, (left, middle, right) = _figure(13, 3)

    def draw(axes: Axes, wanted: Callable[[Point], bool], place: Callable[[Point], int], label: str) -> None:
        points = sorted(filter(wanted, gpu), key=place)
        places = [place(point) for point in points]
        (line,) = axes.plot(places, [model(point) for point in points], "-", linewidth=1)
        color = line.get_color()
        axes.plot(places, [gpu[point] for point in points], "o", color=color, label=f"{label}, GPU")
        axes.plot(places, [wall[point] for point in points], "_", color=color, label=f"{label}, wall")

    draw(left, lambda p: (p.num_rows, p.context) == (1, context), lambda p: p.num_tokens, "1 request")
    draw(middle, lambda p: p.num_rows == p.num_tokens and p.context == context, lambda p: p.num_rows, "1 token each")
    draw(middle, lambda p: (p.num_tokens, p.context) == (most, context), lambda p: p.num_rows, f"{most} tokens in all")
    for count in (1, 32):
        wanted = {point for point in gpu if (point.num_rows, point.num_tokens) == (1, count)}
        draw(right, wanted.__contains__, lambda p: p.context, f"{count} token{'s' * (count > 1)}")
    bare: dict[int, float] = {}
    for row in one.rows:
        found = re.search(r"bare products \S+ m(\d+) ", row.case)
        if found and row.metric == "gemm_ms":
            bare[int(found[1])] = min(row.value, bare.get(int(found[1]), row.value))
    left.plot(sorted(bare), [bare[count] for count in sorted(bare)], "k:", label="bare products")
    names = (
        (left, "tokens in the round", f"batch 1, context {context}"),
        (middle, "requests", f"context {context} each"),
    )
    for axes, name, title in (*names, (right, "tokens of context", "batch 1")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(name)
        axes.set_ylabel("milliseconds a round")
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return _titled(figure, f"8B shape; lines: the model of cost, within {model.worst:.0%} of every round", one)


def plot_drafts() -> Figure:
    """Plot the share of rounds that accept at least so many draft tokens."""
    figure, (axes,) = _figure(6.4, 1)
    head, copy = report("evaluate_eagle3_h200"), report("evaluate_noisy_h200")
    for one, title in ((head, "EAGLE-3 head"), (copy, "135M noisy copy")):
        for answers, style in zip(one.data["evaluation"], ("o-", "s--"), strict=True):
            reached = answers["all"]["tree"]["reached"]
            label = f"{title}, temperature {answers['temperature']:g}"
            axes.plot(range(1, len(reached) + 1), reached, style, label=label)
    axes.set_xlabel("draft tokens accepted, at least")
    axes.set_ylabel("share of rounds")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _titled(figure, "trees of 32 nodes and depth 8, SmolLM2-135M-Instruct, 80 MT-bench questions", head, copy)


PLOTS: dict[str, Callable[[], Figure]] = {
    "split_80": plot_split,
    "mt_bench": plot_mt_bench,
    "draft_steps": plot_steps,
    "engine": plot_engine,
    "drafts": plot_drafts,
}


def _figure(width: float, panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, 3.4), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _bars(
    axes: Axes, values: Mapping[str, float], title: str, label: str = "tokens per second", form: str = "{:,.0f}"
) -> None:
    bars = axes.bar(list(values), list(values.values()), color=["0.6"] * (len(values) - 1) + ["C0"])
    axes.bar_label(bars, fmt=form, fontsize=8)
    axes.margins(y=0.12)
    axes.set_xlabel("mode")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)


def _titled(figure: Figure, title: str, *sources: ResultFile) -> Figure:
    files = ", ".join(f"{source.name}.json" for source in sources)
    figure.suptitle(f"{title}\n{sources[0].device}, {sources[0].date}, {files}", fontsize=9)
    return figure
