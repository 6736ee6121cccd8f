"""What a verify service reports to Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.metrics import ServiceCollector
from verify_service.door.dialer import DraftDialer
from verify_service.door.remote import RemoteVerifyEngine
from verify_service.frames import RoundReport

# The last bound of each is beyond what options and machines produce (docs/operations.md, Histograms): an outlier above
# all bounds would only be known to be large.
_ACCEPT_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256, 1025)
_SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5, 10, 30, 120, 600),
)
_GAP_BUCKETS = (
    *(0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.0004, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 10, 60),
)
# Finest around the time of an 8B model's round on a large GPU.
_GPU_BUCKETS = (
    *(0.001, 0.0015, 0.002, 0.003, 0.004, 0.00425, 0.0045, 0.00475, 0.005, 0.0055, 0.006, 0.007, 0.008),
    *(0.01, 0.012, 0.015, 0.02, 0.03, 0.05, 0.1, 0.5, 1, 2.5, 10),
)
_DRAFTING_BUCKETS = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1),
    10,
)
_ANSWER_BUCKETS = (
    *(0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 60),
)
_NODES_BUCKETS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
_USUAL_NODES_LEARN = 0.05
"""Weight of a round in the usual number of nodes."""
_WINDOW_SECONDS = 5.0
"""Time over which tokens per second are counted."""


class VerifyMetrics:
    """Counts rounds as they happen; the engine's state is read at each scrape."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(ServiceCollector())

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_verify_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"outrider_verify_{name}", text, buckets=buckets, registry=registry)

        self._accept_length = histogram(
            "accept_length", "Tokens committed by one request in one round.", _ACCEPT_BUCKETS
        )
        self._rounds = counter("rounds", "Rounds run.")
        self._round_seconds = histogram("round_seconds", "Wall time of a round.", _SECONDS_BUCKETS)
        self._gap_seconds = histogram(
            "host_gap_seconds",
            "Time between two rounds with the device idle, excluding waits for drafts.",
            _GAP_BUCKETS,
        )
        self._gpu_seconds = histogram("gpu_seconds", "Time of a round on the GPU.", _GPU_BUCKETS)
        self._drafting_seconds = histogram(
            "drafting_seconds", "GPU time of growing trees after a round.", _DRAFTING_BUCKETS
        )
        self._round_nodes = histogram("round_draft_tokens", "Tree nodes in a round.", _NODES_BUCKETS)
        self._hold_seconds = counter("hold_seconds", "Time that rounds waited for drafts.")
        self._held_rounds = counter("held_rounds", "Rounds that waited for drafts.")
        self._drafted_rounds = counter("drafted_rounds", "Rounds with requests that a draft serves.")
        self._fallback_rounds = counter(
            "fallback_rounds",
            "Rounds without any draft although drafts are configured, at the speed of plain decoding.",
        )
        self._resting_rounds = counter(
            "resting_rounds", "Rounds that left out their requests' drafts because plain decoding is faster."
        )
        self._has_drafts = False
        self._hit_rounds = counter(
            "hit_rounds", "Drafted rounds that, without waiting, found at least half of the usual number of nodes."
        )
        self._ready_rounds = counter(
            "ready_rounds", "Drafted rounds that, without waiting, found at least half of the nodes that they took."
        )
        self._ready_nodes = histogram(
            "ready_draft_tokens", "Tree nodes that a drafted round found without waiting.", _NODES_BUCKETS
        )
        self._hit_wait_seconds = histogram(
            "hit_wait_seconds", "Gap before a hit round, including waits for drafts.", _GAP_BUCKETS
        )
        self._answer_seconds = histogram(
            "draft_answer_times_seconds", "Time from a commit to the draft's answer.", _ANSWER_BUCKETS
        )
        self._usual_nodes = 0.0
        self._committed = counter("committed_tokens", "Tokens committed.")
        self._prefilled = counter("prefilled_tokens", "Tokens computed by prefill.")
        self._draft_tokens = counter("draft_tokens", "Tree nodes verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens committed.")
        self._grown_tokens = counter("colocated_draft_tokens", "Verified tree nodes that grew inside rounds.")
        self._grown_accepted = counter("colocated_accepted_tokens", "Committed draft tokens that grew inside rounds.")
        self._accepted_at = counter("accepted_tokens_per_position", "Draft tokens committed, by depth.", "position")
        self._failed = counter("failed_requests", "Requests that failed in a round.")
        self.num_rejected = 0
        """Tree nodes that were verified but not accepted."""
        self._recent: deque[tuple[float, int]] = deque()

    def observe(self, report: RoundReport) -> None:
        """Count a round."""
        figures, accepted, committed = report.figures, sum(report.accepted), sum(report.committed)
        self._rounds.inc()
        self._round_seconds.observe(figures.seconds)
        self._hold_seconds.inc(figures.held)
        if figures.gap is not None:
            self._gap_seconds.observe(figures.gap)
        if figures.gpu is not None:
            self._gpu_seconds.observe(figures.gpu)
        if figures.drafting is not None:
            self._drafting_seconds.observe(figures.drafting)
        self._round_nodes.observe(report.num_nodes)
        self._grown_tokens.inc(report.num_grown)
        self._grown_accepted.inc(report.num_grown_accepted)
        self._draft_tokens.inc(report.num_nodes)
        self._accepted.inc(accepted)
        self._committed.inc(committed)
        self.num_rejected += report.num_nodes - accepted
        self._prefilled.inc(report.num_prefilled)
        self._failed.inc(report.num_failed)
        for length in report.committed:
            self._accept_length.observe(length)
        for length in report.accepted:
            for position in range(length):
                self._accepted_at.labels(position).inc()
        self._observe_drafts(report)
        now = time.monotonic()
        self._recent.append((now, committed))
        while self._recent[0][0] < now - _WINDOW_SECONDS:
            self._recent.popleft()

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens per second over the last seconds."""
        # Other threads call this, too. Only the event loop's thread removes entries: two could remove the same one.
        horizon = time.monotonic() - _WINDOW_SECONDS
        return sum(count for at, count in list(self._recent) if at >= horizon) / _WINDOW_SECONDS

    def watch(self, engine: RemoteVerifyEngine, dialers: Iterable[DraftDialer], num_ranks: int = 1) -> None:
        """Report this engine and its drafts too."""
        self._has_drafts = bool(dialers)
        self.registry.register(_EngineState(engine, dialers, self, num_ranks))

    def _observe_drafts(self, report: RoundReport) -> None:
        """Count how far the drafts were ahead of a round."""
        figures = report.figures
        if figures.held > 0:
            self._held_rounds.inc()
        for seconds in figures.answers:
            self._answer_seconds.observe(seconds)
        if figures.resting:
            self._resting_rounds.inc()
            return
        if figures.ready is None:
            # A round that commits nothing is prefill alone, which no draft takes part in.
            if self._has_drafts and report.committed:
                self._fallback_rounds.inc()
            return
        self._drafted_rounds.inc()
        self._ready_nodes.observe(figures.ready)
        # Rounds without any nodes do not show how many would have paid.
        if report.num_nodes:
            self._usual_nodes += (_USUAL_NODES_LEARN if self._usual_nodes else 1.0) * (
                report.num_nodes - self._usual_nodes
            )
        if figures.ready and report.num_nodes and figures.ready >= report.num_nodes / 2:
            self._ready_rounds.inc()
        if figures.ready and figures.ready >= self._usual_nodes / 2:
            self._hit_rounds.inc()
            if figures.gap is not None:
                self._hit_wait_seconds.observe(figures.gap + figures.held)


@dataclass(frozen=True, eq=False)
class _EngineState(Collector):
    """Figures that engine and drafts count themselves, read at each scrape."""

    engine: RemoteVerifyEngine
    dialers: Iterable[DraftDialer]
    metrics: VerifyMetrics
    num_ranks: int

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each metric."""
        engine, snapshot, backlog = self.engine, self.engine.snapshot, self.engine.backlog
        for name, text, value in (
            ("running_requests", "Requests in rounds.", engine.num_running),
            ("waiting_requests", "Requests that wait for a place.", engine.num_waiting),
            ("waiting_tokens", "Prompt tokens of requests that have no token yet.", backlog.num_tokens),
            ("kv_pages", "Total number of KV pages.", snapshot.num_pages),
            ("kv_pages_used", "KV pages that requests or the radix cache hold.", snapshot.num_pages_used),
            (
                "tokens_per_second",
                f"Committed tokens per second over the last {_WINDOW_SECONDS:g} seconds.",
                self.metrics.tokens_per_second,
            ),
            ("ranks", "Processes that share each layer of the target.", self.num_ranks),
            ("healthy_drafts", "Draft services connected and answering.", engine.num_healthy),
            (
                "drafts_waiting_for_features",
                "Connected draft services that will get features but cannot yet.",
                snapshot.drafts_waiting,
            ),
            ("graphs_pending", "CUDA graphs to capture again before a draft gets features.", snapshot.graphs_pending),
        ):
            yield _family(name, text, "", {"": value}, gauge=True)
        wasted = {"rejected": self.metrics.num_rejected, **snapshot.dropped}
        yield _family("wasted_draft_tokens", "Draft tokens that were of no use, by reason.", "reason", wasted)
        yield _family("declines", "Requests that drafts declined, by reason.", "reason", snapshot.declined)
        refused = {reason: backlog.refused[reason] for reason in ("requests", "tokens")}
        yield _family(
            "refused_requests", "Requests refused because too much is already waiting, by reason.", "reason", refused
        )
        yield _family("slow_readers", "Answers ended because they were left unread.", "", {"": backlog.slow_readers})
        preempted = "Requests preempted for lack of KV pages."
        yield _family("preemptions", preempted, "", {"": snapshot.num_preemptions})
        displaced = "Requests that made way for one of another API key, which had none running."
        yield _family("displaced_requests", displaced, "", {"": snapshot.num_displaced})
        connected = {dialer.address: dialer.state == "connected" for dialer in self.dialers}
        yield _family("draft_connected", "Whether a draft is connected.", "address", connected, gauge=True)
        answers = {draft.address: draft.answer_seconds for draft in snapshot.drafts}
        text = "Typical time of a draft's answer to a commit."
        yield _family("draft_answer_seconds", text, "address", answers, gauge=True)
        cost = {str(width): seconds for width, seconds in snapshot.cost.items()}
        yield _family("round_cost_seconds", "t(M): time of a round of M tokens.", "tokens", cost, gauge=True)


def _family(name: str, text: str, label: str, values: Mapping[str, float], *, gauge: bool = False) -> Metric:
    """Return a metric with a value for each value of `label`; without a label, `values` holds the only one."""
    kind = GaugeMetricFamily if gauge else CounterMetricFamily
    family = kind(f"outrider_verify_{name}", text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family
