"""Figures of a case of the split benchmark, computed from answers, metrics pages and process costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common import Cost
from benchmarks.split.cases import SplitCase
from benchmarks.split.load import CaseAnswers
from outrider.drafting.tree_growth import ANSWER_PHASES
from outrider.metrics import Histogram, MetricsPage
from outrider_tools.bench.report import Row

_VERIFY = "outrider_verify_"
_DRAFT = "outrider_draft_"


@dataclass
class Measured:
    """A case after its run."""

    case: SplitCase
    title: str
    answers: CaseAnswers
    verify: MetricsPage
    """What verify's metrics gained during the run."""
    draft: MetricsPage = field(default_factory=MetricsPage)
    draft_cost: Cost | None = None
    """Processor time of the run, memory at its end."""
    start_seconds: float = 0.0
    """Seconds that the draft service took to start."""
    figures: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Value and unit by metric."""

    def add(self, metric: str, value: float, unit: str) -> None:
        """Add a figure."""
        self.figures[metric] = (value, unit)

    def get(self, metric: str) -> float:
        """Return a figure; NaN if the case has none of that name."""
        return self.figures[metric][0] if metric in self.figures else float("nan")

    def rows(self) -> list[Row]:
        """Return the figures as rows of the report."""
        return [Row(self.title, metric, value, unit) for metric, (value, unit) in self.figures.items()]


def work_out(measured: Measured) -> None:
    """Compute all figures that need no other case."""
    answers, verify = measured.answers, measured.verify
    rounds = max(answers.rounds, 1)
    measured.add("tokens_per_second", answers.tokens / answers.seconds, "tokens/s")
    measured.add("accept_length", answers.tokens / rounds, "tokens")
    measured.add("draft_tokens_per_round", answers.drafted / rounds, "tokens")
    measured.add("accept_rate", answers.accepted / max(answers.drafted, 1), "ratio")
    _rounds(measured)
    if measured.case.drafts:
        if not measured.case.colocated:
            _ahead(measured)
        for position in range(64):
            count = verify.total(f"{_VERIFY}accepted_tokens_per_position{{{position}}}")
            if count <= 0:
                break
            measured.add(f"rounds_accepting_depth_{position + 1}", count / rounds, "ratio")
        _drafting(measured)


def _times(measured: Measured, metric: str, histogram: Histogram, quantiles: Sequence[int]) -> None:
    if histogram.count:
        measured.add(metric, 1e3 * histogram.mean, "ms")
        for share in quantiles:
            measured.add(f"{metric}_p{share}", 1e3 * histogram.quantile(share / 100), "ms")


def _rounds(measured: Measured) -> None:
    """Compute the parts of a round's time: GPU, host, hold."""
    verify = measured.verify
    rounds = max(verify.total(f"{_VERIFY}rounds"), 1)
    measured.add("rounds", rounds, "rounds")
    measured.add("round_wall_ms", 1e3 * measured.answers.seconds / rounds, "ms")
    measured.add("round_ms", 1e3 * verify.histogram(f"{_VERIFY}round_seconds").mean, "ms")
    _times(measured, "round_gpu_ms", verify.histogram(f"{_VERIFY}gpu_seconds"), (50, 90))
    _times(measured, "drafting_gpu_ms", verify.histogram(f"{_VERIFY}drafting_seconds"), (50, 90))
    _times(measured, "host_gap_ms", verify.histogram(f"{_VERIFY}host_gap_seconds"), (50, 90, 99))
    measured.add("hold_ms", 1e3 * verify.total(f"{_VERIFY}hold_seconds") / rounds, "ms")
    measured.add("held_rounds", verify.total(f"{_VERIFY}held_rounds") / rounds, "ratio")


def _ahead(measured: Measured) -> None:
    """Compute how far the draft was ahead."""
    verify = measured.verify
    drafted = max(verify.total(f"{_VERIFY}drafted_rounds"), 1)
    measured.add("hit_rate", verify.total(f"{_VERIFY}hit_rounds") / drafted, "ratio")
    measured.add("ready_rate", verify.total(f"{_VERIFY}ready_rounds") / drafted, "ratio")
    measured.add("ready_draft_tokens", verify.histogram(f"{_VERIFY}ready_draft_tokens").mean, "tokens")
    _times(measured, "hit_wait_ms", verify.histogram(f"{_VERIFY}hit_wait_seconds"), (50, 90, 99))
    _times(measured, "draft_answer_ms", verify.histogram(f"{_VERIFY}draft_answer_times_seconds"), (50, 90, 99))
    for reason, count in verify.labelled(f"{_VERIFY}wasted_draft_tokens"):
        measured.add(f"wasted_{reason}_per_round", count / drafted, "tokens")


def _drafting(measured: Measured) -> None:
    """Compute the draft service's work and costs: all that it counts and times, under its own names."""
    seconds, page = measured.answers.seconds, measured.draft
    for name, count in page.counters.items():
        if name.startswith(_DRAFT) and count:
            measured.add(f"draft_{name.removeprefix(_DRAFT)}_per_second", count / seconds, "1/s")
    for phase in ANSWER_PHASES:
        histogram = page.histogram(f"{_DRAFT}answer_seconds{{{phase}}}")
        _times(measured, f"draft_answer_{phase}_ms", histogram, (50, 90))
    for name, histogram in page.histograms.items():
        if name.startswith(f"{_DRAFT}answer_seconds"):
            continue
        if name.startswith(_DRAFT) and name.endswith("_seconds"):
            metric = f"draft_{name.removeprefix(_DRAFT).removesuffix('_seconds')}_ms"
            _times(measured, metric, histogram, (50, 99))
        elif name.startswith(_DRAFT) and histogram.count:
            measured.add(f"draft_{name.removeprefix(_DRAFT)}", histogram.mean, "mean")
    if measured.draft_cost is not None:
        measured.add("draft_cpu_seconds_per_second", measured.draft_cost.cpu_seconds / seconds, "s/s")
        measured.add("draft_resident_mib", measured.draft_cost.resident_mib, "MiB")
        measured.add("draft_gpu_mib", measured.draft_cost.gpu_mib, "MiB")
        measured.add("draft_start_seconds", measured.start_seconds, "s")


def compare(runs: Sequence[Measured]) -> None:
    """Compute the figures that compare a case with plain decoding and with lockstep."""
    for run in runs:
        plain = _plain_for(run, runs)
        if plain is None or not run.case.drafts:
            continue
        run.add("speedup_over_plain", run.get("tokens_per_second") / plain.get("tokens_per_second"), "ratio")
        if "hit_wait_ms_p50" in run.figures:
            run.add("hit_wait_over_plain_gap_ms", run.get("hit_wait_ms_p50") - plain.get("host_gap_ms_p50"), "ms")
        pairs = list(zip(run.answers.texts, plain.answers.texts, strict=False))
        run.add("equal_texts", sum(one == other for one, other in pairs), "texts")
        run.add("texts", len(pairs), "texts")
        parted = [_agreed(one, other) for one, other in pairs if one != other]
        if parted:
            run.add("tokens_until_texts_part", sum(parted) / len(parted), "tokens")
    for run in runs:
        peers = [other for other in runs if _same_but_lockstep(run.case, other.case)]
        if peers and (run.case.colocated or not run.case.lockstep):
            fastest = max(peers, key=lambda peer: peer.get("tokens_per_second"))
            longest = max(peers, key=lambda peer: peer.get("accept_length"))
            deep = [peer for peer in peers if peer.case.options.get("speculative_num_steps") == "8"]
            reference = max(deep, key=lambda peer: peer.get("accept_length")) if deep else longest
            run.add("speedup_over_lockstep", run.get("tokens_per_second") / fastest.get("tokens_per_second"), "ratio")
            run.add("accept_over_lockstep", run.get("accept_length") / reference.get("accept_length"), "ratio")


def _plain_for(run: Measured, runs: Sequence[Measured]) -> Measured | None:
    """Return the run of plain decoding with the same prompts."""
    for other in runs:
        if not other.case.drafts and other.case.load == run.case.load:
            return other
    return None


def _same_but_lockstep(case: SplitCase, other: SplitCase) -> bool:
    same = (case.drafter, case.load) == (other.drafter, other.load)
    return same and case.drafts and other.lockstep and not other.colocated


def _agreed(one: list[int], other: list[int]) -> int:
    """Return the number of tokens until two texts differ."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


COLUMNS = (
    ("tok/s", "tokens_per_second", 1),
    ("xplain", "speedup_over_plain", 2),
    ("xlock", "speedup_over_lockstep", 2),
    ("accept", "accept_length", 2),
    ("/lock", "accept_over_lockstep", 2),
    ("hit", "hit_rate", 2),
    ("nodes", "draft_tokens_per_round", 1),
    ("gpu", "round_gpu_ms", 2),
    ("gap", "host_gap_ms", 2),
    ("hitgap", "hit_wait_ms_p50", 2),
    ("hold", "hold_ms", 2),
    ("wire50", "draft_answer_ms_p50", 2),
    ("wire90", "draft_answer_ms_p90", 2),
    *((phase[:5], f"draft_answer_{phase}_ms_p50", 2) for phase in ANSWER_PHASES),
    ("equal", "equal_texts", 0),
    ("cpu", "draft_cpu_seconds_per_second", 2),
    ("MiB", "draft_gpu_mib", 0),
)


def table(runs: Sequence[Measured]) -> str:
    """Return all cases in short, with times in ms."""
    titles = [" ".join(run.title.split()[1:]) for run in runs]
    width = max(map(len, titles), default=0)
    lines = [" " * width + "".join(f"{head:>7}" for head, _, _ in COLUMNS)]
    for title, run in zip(titles, runs, strict=True):
        cells = [
            f"{run.get(metric):7.{digits}f}" if metric in run.figures else "      -" for _, metric, digits in COLUMNS
        ]
        lines.append(f"{title:{width}}" + "".join(cells))
    return "\n".join(lines)
