"""What the draft service tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from outrider.tree.author import Outcome
from outrider.tree.messages import DeclineReason

_GROWTH_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)

_BURST_FIGURES = {
    "bursts": "Bursts of a draft model.",
    "burst_steps": "Steps of all bursts.",
    "burst_nodes": "Nodes that bursts ran.",
    "burst_places": "Nodes that the steps of all bursts had room for; burst_nodes over this is their occupancy.",
    "burst_seconds": "Time from the launch of a burst until its result was taken.",
    "prompt_tokens": "Tokens that a draft model computed outside of bursts.",
}

DROP_REASONS = ("malformed", "unexpected", "unknown_request", "late_features")


class DraftMetrics:
    """Counters and gauges of one service, in a registry of their own."""

    def __init__(self, sources: tuple[str, ...]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        grown = self._counter("outrider_draft_nodes_grown", "Tree nodes appended, by source.", "source")
        commits = self._counter("outrider_draft_commits", "Commits applied, by what they did to the tree.", "outcome")
        declines = self._counter("outrider_draft_declines", "Requests declined, by reason.", "reason")
        dropped = self._counter("outrider_draft_messages_dropped", "Messages dropped, by reason.", "reason")
        self.nodes_grown = {number: grown.labels(source) for number, source in enumerate(sources)}
        self.commits = {outcome: commits.labels(outcome.value) for outcome in Outcome}
        self.declines = {reason: declines.labels(reason.name.lower()) for reason in DeclineReason}
        self.dropped = {reason: dropped.labels(reason) for reason in DROP_REASONS}
        self.growth_seconds = Histogram(
            "outrider_draft_growth_seconds",
            "Time of one slice of growth.",
            buckets=_GROWTH_SECONDS,
            registry=self.registry,
        )

        self._bursts = {
            name: Counter(f"outrider_draft_{name}", help, registry=self.registry)
            for name, help in _BURST_FIGURES.items()
        }

    def count(self, name: str, amount: float) -> None:
        """Add to a figure of bursts."""
        self._bursts[name].inc(amount)

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when it is asked for."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(name, help, [label], registry=self.registry)
