"""What a verify service reports to Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verify_service.engine import Engine
from verify_service.request import Update
from verify_service.round import Entry
from verify_service.session import DraftDialer

_ACCEPT_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_NODES_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)
_WINDOW_SECONDS = 5.0


class VerifyMetrics:
    """Counts rounds as they happen; the state of the engine is read when somebody scrapes."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_verify_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"outrider_verify_{name}", text, buckets=buckets, registry=registry)

        self._accept_length = histogram(
            "accept_length", "Tokens committed by one request in one round.", _ACCEPT_BUCKETS
        )
        self._rounds = counter("rounds", "Rounds run.")
        self._round_seconds = histogram("round_seconds", "Wall time of a round.", _SECONDS_BUCKETS)
        self._round_nodes = histogram("round_draft_tokens", "Tree nodes in a round.", _NODES_BUCKETS)
        self._hold_seconds = counter("hold_seconds", "Time that rounds waited for drafts.")
        self._committed = counter("committed_tokens", "Tokens committed.")
        self._prefilled = counter("prefilled_tokens", "Tokens computed by prefill.")
        self._draft_tokens = counter("draft_tokens", "Tree nodes verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens committed.")
        self._accepted_at = counter("accepted_tokens_per_position", "Draft tokens committed, by depth.", "position")
        self._failed = counter("failed_requests", "Requests that a round failed.")
        self._num_rejected = 0
        self._recent: deque[tuple[float, int]] = deque()

    def round(self, entries: Sequence[Entry], updates: Sequence[Update], seconds: float, held: float) -> None:
        """A round took `seconds`, after holding for `held` seconds. `updates` are what it brought each request."""
        self._rounds.inc()
        self._round_seconds.observe(seconds)
        self._hold_seconds.inc(held)
        nodes = sum(len(entry.nodes) for entry in entries)
        accepted = sum(update.num_accepted_tokens for update in updates)
        committed = sum(len(update.token_ids) for update in updates)
        self._round_nodes.observe(nodes)
        self._draft_tokens.inc(nodes)
        self._accepted.inc(accepted)
        self._committed.inc(committed)
        self._num_rejected += nodes - accepted
        self._prefilled.inc(sum(entry.num_extend for entry in entries if entry.num_extend > 1))
        for update in updates:
            if update.error is not None:
                self._failed.inc()
            elif update.token_ids:
                self._accept_length.observe(len(update.token_ids))
            for position in range(update.num_accepted_tokens):
                self._accepted_at.labels(position).inc()
        self._recent.append((time.monotonic(), committed))
        self._forget_old()

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens per second over the last seconds."""
        # Other threads ask: the engine's alone takes anything out, and two takers could take the same entry.
        horizon = time.monotonic() - _WINDOW_SECONDS
        return sum(count for at, count in list(self._recent) if at >= horizon) / _WINDOW_SECONDS

    def watch(self, engine: Engine, dialers: Sequence[DraftDialer]) -> None:
        """Report this engine and its drafts too."""

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"outrider_verify_{name}", text, registry=self.registry).set_function(value)

        gauge("running_requests", "Requests in rounds.", lambda: len(engine.scheduler.running))
        gauge("waiting_requests", "Requests that wait for a place.", lambda: len(engine.scheduler.waiting))
        gauge("kv_pages", "KV pages in all.", lambda: engine.memory.num_pages)
        gauge("kv_pages_used", "KV pages that requests or the radix cache hold.", lambda: engine.memory.num_used)
        gauge("tokens_per_second", "Committed tokens per second, lately.", lambda: self.tokens_per_second)
        gauge("healthy_drafts", "Draft services connected and answering.", lambda: num_healthy(engine))
        self.registry.register(_EngineCounts(engine, dialers, self))

    @property
    def num_rejected(self) -> int:
        """Tree nodes that were verified in vain."""
        return self._num_rejected

    def _forget_old(self) -> None:
        horizon = time.monotonic() - _WINDOW_SECONDS
        while self._recent and self._recent[0][0] < horizon:
            self._recent.popleft()


def num_healthy(engine: Engine) -> int:
    """Draft services connected and answering."""
    return sum(peer.health.good for peer in list(engine.drafts.peers.values()))


class _EngineCounts(Collector):
    """Counts that engine and drafts keep themselves."""

    def __init__(self, engine: Engine, dialers: Sequence[DraftDialer], metrics: VerifyMetrics) -> None:
        self._engine = engine
        self._dialers = dialers
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing fixed: the labels come and go."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family each."""
        drafts = self._engine.drafts
        wasted = CounterMetricFamily(
            "outrider_verify_wasted_draft_tokens", "Draft tokens that brought nothing, by reason.", labels=["reason"]
        )
        wasted.add_metric(["rejected"], self._metrics.num_rejected)
        for reason, count in dict(drafts.dropped).items():
            wasted.add_metric([reason], count)
        yield wasted
        declines = CounterMetricFamily("outrider_verify_declines", "Requests that drafts declined.", labels=["reason"])
        for reason, count in dict(drafts.declined).items():
            declines.add_metric([reason], count)
        yield declines
        preemptions = CounterMetricFamily("outrider_verify_preemptions", "Requests that gave up their pages.")
        preemptions.add_metric([], self._engine.scheduler.num_preemptions)
        yield preemptions
        state = GaugeMetricFamily(
            "outrider_verify_draft_connected", "Whether a draft is connected.", labels=["address"]
        )
        answer = GaugeMetricFamily(
            "outrider_verify_draft_answer_seconds", "Typical time of a draft's answer to a commit.", labels=["address"]
        )
        for dialer in self._dialers:
            state.add_metric([dialer.address], dialer.state == "connected")
        for peer in list(drafts.peers.values()):
            answer.add_metric([peer.port.address], peer.health.typical)
        yield state
        yield answer
        cost = GaugeMetricFamily("outrider_verify_round_cost_seconds", "t(M): a round of M tokens.", labels=["tokens"])
        for width, seconds in self._engine.budget.cost.table().items():
            cost.add_metric([str(width)], seconds)
        yield cost
