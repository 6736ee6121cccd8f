"""Prometheus metrics: vLLM's names for what vLLM has, `outrider_gateway_*` for the rest; SGLang's on request.

In `vllm:*` metrics a request is one answer. Each scrape asks the verify replicas for their loads.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from gateway.core.answer import Answer, Delta
from gateway.core.gate import Gate
from gateway.core.router import ReplicaState, Router
from outrider.protocol.generation import GenerationUpdate

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_MAX_POSITIONS = 64
# The last bound of each is beyond what options allow (docs/operations.md, Histograms): without a bound above it, one
# would only know of an outlier that it was long.
_LONGEST = (1920, 3600, 7200, 86_400)
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    *_LONGEST,
)
_TOKEN_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1),
    *(2.5, 5, 10, 20, 60, 300),
    *_LONGEST,
)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, *_LONGEST)
_COUNT_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000),
    *(500_000, 1 << 20),
)
_SPEED_BUCKETS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000),
    *(10_000, 20_000, 100_000),
)
_LEAST_SECONDS = 0.01
"""The speed of an answer whose tokens all came within less than this is not measured."""
_ACCEPT_BUCKETS = (*range(1, 17), 24, 32, 64, 128, 256, 1025)


class _ManyHistogram(Histogram):
    """A histogram that counts equal values together: those of one message are equal, and there are many messages."""

    def observe_many(self, value: float, count: int) -> None:
        """Do the same as `count` calls of `observe`. For a child, or a histogram without labels."""
        self._sum.inc(value * count)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)


class GatewayMetrics:
    """The metric families of one gateway, in a registry of their own. Most have the label model_name."""

    def __init__(self) -> None:
        # Scrapers find counters by the beginning of their name, and would add the times of creation to them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        registry, by_model = self.registry, ("model_name",)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (*by_model, *labels), registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = by_model) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> _ManyHistogram:
            return _ManyHistogram(name, text, by_model, registry=registry, buckets=buckets)

        self.running = gauge("vllm:num_requests_running", "Requests in rounds or prefill.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting in a queue.")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use; 1 is all of them.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the radix cache.")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the radix cache.")
        self.success = counter("vllm:request_success", "Finished requests, by finish reason.", "finished_reason")
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Time from arrival to the first token.", _TTFT_BUCKETS
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two tokens; the tokens of one round share its time.",
            _TOKEN_BUCKETS,
        )
        self.per_output_token = histogram(
            "vllm:time_per_output_token_seconds", "Older name of inter_token_latency_seconds.", _TOKEN_BUCKETS
        )
        self.request_per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token of a request, after its first token.",
            _TOKEN_BUCKETS,
        )
        self.end_to_end = histogram(
            "vllm:e2e_request_latency_seconds", "Time from a request's arrival to its end.", _E2E_BUCKETS
        )
        self.queue_time = histogram(
            "vllm:request_queue_time_seconds", "Time that a request waited in verify's queue.", _TTFT_BUCKETS
        )
        self.prefill_time = histogram(
            "vllm:request_prefill_time_seconds",
            "Time from arrival to the first token, without the time in the queue.",
            _TTFT_BUCKETS,
        )
        self.decode_time = histogram(
            "vllm:request_decode_time_seconds", "Time from a request's first token to its last.", _E2E_BUCKETS
        )
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of each request.", _COUNT_BUCKETS)
        self.request_generation = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request.", _COUNT_BUCKETS
        )
        self.drafts = counter("vllm:spec_decode_num_drafts", "Rounds that verified draft tokens.")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.accepted_per_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by depth.", "position"
        )
        self.rounds = counter("outrider_gateway_rounds", "Verify rounds.")
        self.accept_length = histogram(
            "outrider_gateway_accept_length", "Tokens committed in a round.", _ACCEPT_BUCKETS
        )
        self.request_speed = histogram(
            "outrider_gateway_request_tokens_per_second", "Speed of a request after its first token.", _SPEED_BUCKETS
        )
        self.speed = gauge("outrider_gateway_tokens_per_second", "Tokens per second committed by all replicas.")
        self.drafts_healthy = gauge("outrider_gateway_healthy_drafts", "Draft services that the replicas can use.")
        errors = "Requests refused or failed."
        self.errors = Counter("outrider_gateway_errors", errors, ("door", "code"), registry=registry)
        self.requests = gauge("outrider_gateway_requests_in_flight", "Client requests being served.", ())
        self.answers = gauge("outrider_gateway_answers_in_flight", "Answers being generated.", ())
        self.places = gauge("outrider_gateway_max_answers", "Most answers generated at once.", ())
        self.draining = gauge("outrider_gateway_draining", "1 while shutting down.", ())
        state = "1 for the state that a verify replica is in."
        self.replica_state = gauge("outrider_gateway_verify_state", state, ("replica", "state"))
        self.answers_of = cache(partial(_AnswerSeries, self))
        """The series that each message of an answer adds to, by the model's name."""

    def mean_accept_lengths(self) -> dict[str, float]:
        """Return the mean of the tokens committed in a round since the start, by model; 0 without rounds."""
        return _ratios(_totals(self.accept_length, "_sum"), _totals(self.accept_length, "_count"))

    async def render(self, model_name: str, router: Router, gate: Gate) -> bytes:
        """Return the page for a scraper. `model_name` is empty before a model is known."""
        await asyncio.gather(*(replica.refresh_load() for replica in router.replicas))
        self.requests.set(gate.num_requests)
        self.answers.set(gate.num_answers)
        self.draining.set(gate.draining)
        self.places.set(gate.max_answers)
        self.replica_state.clear()  # replicas come and go
        for replica in router.replicas:
            for state in ReplicaState:
                self.replica_state.labels(replica.address, state.value).set(replica.state is state)
        if model_name:
            self._set_loads(model_name, router)
        return generate_latest(self.registry)

    def _set_loads(self, model_name: str, router: Router) -> None:
        loads = [r.load for r in router.replicas]
        num_pages = sum(load.num_pages for load in loads)
        used = sum(load.num_pages_used for load in loads) / num_pages if num_pages else 0.0
        for gauge, value in (
            (self.running, sum(load.num_running for load in loads)),
            (self.waiting, sum(load.num_waiting for load in loads)),
            (self.kv_usage, used),
            (self.speed, sum(load.tokens_per_second for load in loads)),
            (self.drafts_healthy, sum(load.num_healthy_drafts for load in loads)),
        ):
            gauge.clear()  # a replica may have come back with another model
            gauge.labels(model_name).set(value)


class _AnswerSeries:
    """The series of one model that every message of an answer adds to: looking them up takes longer than adding."""

    def __init__(self, metrics: GatewayMetrics, model_name: str) -> None:
        self.generation_tokens = metrics.generation_tokens.labels(model_name)
        self.inter_token = metrics.inter_token.labels(model_name)
        self.per_output_token = metrics.per_output_token.labels(model_name)
        self.accept_length = metrics.accept_length.labels(model_name)
        self.rounds = metrics.rounds.labels(model_name)
        self.drafts = metrics.drafts.labels(model_name)
        self.draft_tokens = metrics.draft_tokens.labels(model_name)
        self.accepted_tokens = metrics.accepted_tokens.labels(model_name)
        self.accepted_at = cache(partial(metrics.accepted_per_position.labels, model_name))
        """Counters of draft tokens accepted at a depth; a series begins with its first token."""


class AnswerMeter:
    """Measures one answer."""

    def __init__(self, metrics: GatewayMetrics, model_name: str, answer: Answer) -> None:
        self._metrics = metrics
        self._name = model_name
        self._series = metrics.answers_of(model_name)
        self._answer = answer
        self._arrived = answer.job.arrived
        self._first: float | None = None
        self._last = 0.0
        self._queued = 0.0

    def chunk(self, chunk: GenerationUpdate, delta: Delta) -> None:
        """Count what came from verify, and what of it reached the client."""
        num_tokens = len(delta.tokens)
        self._queued = max(self._queued, chunk.queue_seconds)
        if num_tokens:
            self._time(num_tokens)
            self._series.generation_tokens.inc(num_tokens)
        if chunk.rounds:
            self._count_rounds(chunk)

    def _time(self, num_tokens: int) -> None:
        now, series, later = time.monotonic(), self._series, num_tokens
        if self._first is None:
            self._first = now
            self._metrics.first_token.labels(self._name).observe(now - self._arrived)
            later -= 1
        if later:
            gap = (now - self._last) / num_tokens if self._last else 0.0
            series.inter_token.observe_many(gap, later)
            series.per_output_token.observe_many(gap, later)
        self._last = now

    def _count_rounds(self, chunk: GenerationUpdate) -> None:
        series, rounds, left = self._series, chunk.rounds, len(chunk.token_ids)
        series.rounds.inc(len(rounds))
        lengths, depths = Tally[int](), Tally[int]()
        for counts in rounds:
            # A round whose last accepted token ends the answer has no bonus token.
            length = min(counts.num_accepted_tokens + 1, left)
            left -= length
            lengths[length] += 1
            if counts.num_draft_tokens:
                depths[counts.num_accepted_tokens] += 1
        for length, count in lengths.items():
            series.accept_length.observe_many(length, count)
        if depths:
            series.drafts.inc(depths.total())
            series.draft_tokens.inc(chunk.num_draft_tokens)
            series.accepted_tokens.inc(chunk.num_accepted_tokens)
            for position in range(min(max(depths), _MAX_POSITIONS)):
                reached = sum(count for depth, count in depths.items() if depth > position)
                series.accepted_at(position).inc(reached)

    def finish(self, outcome: str) -> None:
        """End the measurement; `outcome` is "abort" or "error", for an answer that is not whole."""
        metrics, name, now = self._metrics, self._name, time.monotonic()
        reason, usage = self._answer.finish_reason, self._answer.usage
        word = outcome if reason is None else reason.name.lower()
        num_prompt, num_tokens = usage.prompt_tokens, usage.completion_tokens
        metrics.success.labels(name, word).inc()
        metrics.prompt_tokens.labels(name).inc(num_prompt)
        metrics.prefix_queries.labels(name).inc(num_prompt)
        metrics.prefix_hits.labels(name).inc(usage.cached_prompt_tokens)
        metrics.request_prompt.labels(name).observe(num_prompt)
        metrics.request_generation.labels(name).observe(num_tokens)
        metrics.end_to_end.labels(name).observe(now - self._arrived)
        if self._first is not None:
            metrics.queue_time.labels(name).observe(self._queued)
            metrics.prefill_time.labels(name).observe(max(0.0, self._first - self._arrived - self._queued))
            metrics.decode_time.labels(name).observe(self._last - self._first)
        if self._first is not None and num_tokens > 1 and self._last - self._first >= _LEAST_SECONDS:
            mean = (self._last - self._first) / (num_tokens - 1)
            metrics.request_per_token.labels(name).observe(mean)
            metrics.request_speed.labels(name).observe(1 / mean)


class SglangNames(Collector):
    """The metric families of a gateway under SGLang's names, read from the others at each scrape.

    Rates and lengths are means since the start; SGLang's are those of its last batches.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._renamed: dict[str, MetricWrapperBase] = {
            "sglang:num_running_reqs": metrics.running,
            "sglang:num_queue_reqs": metrics.waiting,
            "sglang:token_usage": metrics.kv_usage,
            "sglang:gen_throughput": metrics.speed,
            "sglang:prompt_tokens": metrics.prompt_tokens,
            "sglang:generation_tokens": metrics.generation_tokens,
            "sglang:cached_tokens": metrics.prefix_hits,
            "sglang:time_to_first_token_seconds": metrics.first_token,
            "sglang:inter_token_latency_seconds": metrics.inter_token,
            "sglang:time_per_output_token_seconds": metrics.per_output_token,
            "sglang:e2e_request_latency_seconds": metrics.end_to_end,
            "sglang:queue_time_seconds": metrics.queue_time,
            "sglang:prompt_tokens_histogram": metrics.request_prompt,
            "sglang:generation_tokens_histogram": metrics.request_generation,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for name, source in self._renamed.items():
            for family in source.collect():
                renamed = Metric(name, family.documentation, family.type)
                renamed.samples = [s._replace(name=name + s.name.removeprefix(family.name)) for s in family.samples]
                yield renamed
        metrics = self._metrics
        ended, abort = _totals(metrics.success), _totals(metrics.success, finished_reason="abort")
        aborted = {model: abort.get(model, 0.0) for model in ended}
        yield _family(CounterMetricFamily, "num_requests", "Requests that ended.", ended)
        yield _family(CounterMetricFamily, "num_aborted_requests", "Requests that their clients cancelled.", aborted)
        yield _family(
            GaugeMetricFamily,
            "cache_hit_rate",
            "Share of the prompt tokens found in the radix cache.",
            _ratios(_totals(metrics.prefix_hits), _totals(metrics.prefix_queries)),
        )
        yield _family(
            GaugeMetricFamily,
            "spec_accept_length",
            "Mean number of tokens committed in a round.",
            metrics.mean_accept_lengths(),
        )
        yield _family(
            GaugeMetricFamily,
            "spec_accept_rate",
            "Share of the verified draft tokens that were accepted.",
            _ratios(_totals(metrics.accepted_tokens), _totals(metrics.draft_tokens)),
        )


def _totals(source: MetricWrapperBase, suffix: str = "_total", **labels: str) -> dict[str, float]:
    """Return the sums, by model, of the samples with this suffix and these labels."""
    totals: dict[str, float] = defaultdict(float)
    for family in source.collect():
        for sample in family.samples:
            if sample.name == family.name + suffix and labels.items() <= sample.labels.items():
                totals[sample.labels["model_name"]] += sample.value
    return totals


def _ratios(parts: Mapping[str, float], wholes: Mapping[str, float]) -> dict[str, float]:
    return {model: parts.get(model, 0.0) / whole if whole else 0.0 for model, whole in wholes.items()}


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, by_model: Mapping[str, float]
) -> Metric:
    family = kind(f"sglang:{name}", text, labels=["model_name"])
    for model, value in by_model.items():
        family.add_metric([model], value)
    return family
