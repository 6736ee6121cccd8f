"""Prometheus metrics of the draft service."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.registry import Collector

from draft_service.frames import GROWTH_SECONDS, DraftEngineState
from outrider.drafting.tree_growth import ANSWER_PHASES, ANSWER_SECONDS
from outrider.metrics import ServiceCollector
from outrider.protocol.speculation import DeclineReason
from outrider.tree.author import Outcome

_BURST_FIGURES = {
    "bursts": "Bursts of a draft model.",
    "burst_steps": "Steps of all bursts.",
    "burst_nodes": "Nodes that bursts ran.",
    "burst_places": "Nodes that the steps of all bursts had room for; burst_nodes divided by this is their occupancy.",
    "burst_seconds": "Time from the launch of a burst until its result was taken.",
    "prompt_tokens": "Tokens that a draft model computed outside of bursts.",
}

DROP_REASONS = ("malformed", "unexpected", "unknown_request", "late_features")


class DraftMetrics:
    """Counters and gauges of one service, in a registry of their own."""

    def __init__(self, sources: tuple[str, ...]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ServiceCollector())
        PlatformCollector(registry=self.registry)
        grown = self._counter("outrider_draft_nodes_grown", "Tree nodes appended, by source.", "source")
        commits = self._counter("outrider_draft_commits", "Commits applied, by what they did to the tree.", "outcome")
        declines = self._counter("outrider_draft_declines", "Requests declined, by reason.", "reason")
        dropped = self._counter("outrider_draft_messages_dropped", "Messages dropped, by reason.", "reason")
        self.nodes_grown = {number: grown.labels(source) for number, source in enumerate(sources)}
        self.commits = {outcome: commits.labels(outcome.value) for outcome in Outcome}
        self.declines = {reason: declines.labels(reason.name.lower()) for reason in DeclineReason}
        self.dropped = {reason: dropped.labels(reason) for reason in DROP_REASONS}
        self._slices = _Counted("outrider_draft_growth_seconds", "Time of one slice of growth.", GROWTH_SECONDS)
        text = "Time from reading a commit to the answer to it, by phase."
        self._phases = _Counted("outrider_draft_answer_seconds", text, ANSWER_SECONDS, "phase", ANSWER_PHASES)
        self.registry.register(self._slices)
        self.registry.register(self._phases)
        self._bursts = {
            name: Counter(f"outrider_draft_{name}", help, registry=self.registry)
            for name, help in _BURST_FIGURES.items()
        }

    def take(self, state: DraftEngineState) -> None:
        """Add the engine's counts since the last state."""
        for source, count in state.grown.items():
            self.nodes_grown[source].inc(count)
        for outcome, count in state.commits.items():
            self.commits[outcome].inc(count)
        for reason, count in state.declines.items():
            self.declines[reason].inc(count)
        for why, count in state.dropped.items():
            self.dropped[why].inc(count)
        for name, amount in state.bursts.items():
            self._bursts[name].inc(amount)
        self._slices.add("", state.slices, state.slice_seconds)
        for phase, counts in state.phases.items():
            self._phases.add(phase, counts, state.phase_seconds[phase])

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(name, help, [label], registry=self.registry)


class _Counted(Collector):
    """A histogram that the engine counts: thousands of observations a second are too many for an event loop."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str = "", values: Sequence[str] = ("",)
    ) -> None:
        """`values` are those of `label`, if there is one."""
        self._name, self._text, self._label = name, text, label
        self._bounds = [*map(str, bounds), "+Inf"]
        self._counts = {value: [0] * len(self._bounds) for value in values}
        self._seconds = dict.fromkeys(values, 0.0)

    def add(self, value: str, counts: list[int], seconds: float) -> None:
        """Add observations by interval, and their total time, to the series with this label value."""
        for place, count in enumerate(counts):
            self._counts[value][place] += count
        self._seconds[value] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        for value, counts in self._counts.items():
            buckets = list(zip(self._bounds, itertools.accumulate(counts), strict=True))
            family.add_metric([value] if self._label else [], buckets, self._seconds[value])
        yield family
