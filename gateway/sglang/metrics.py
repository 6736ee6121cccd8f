"""SGLang's names for what the gateway counts anyway, for dashboards made for SGLang."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from gateway.core.metrics import GatewayMetrics


class SglangNames(Collector):
    """The families of a gateway once more, as SGLang calls them; read at a scrape, counted nowhere else.

    Rates and lengths are means since the start, where SGLang's are those of its last batches.
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
        """One family each."""
        for name, source in self._renamed.items():
            for family in source.collect():
                renamed = Metric(name, family.documentation, family.type)
                renamed.samples = [s._replace(name=name + s.name.removeprefix(family.name)) for s in family.samples]
                yield renamed
        metrics = self._metrics
        ended, abort = _totals(metrics.success), _totals(metrics.success, finished_reason="abort")
        aborted = {model: abort.get(model, 0.0) for model in ended}
        yield _family(CounterMetricFamily, "num_requests", "Requests that came to an end.", ended)
        yield _family(CounterMetricFamily, "num_aborted_requests", "Requests that their clients gave up.", aborted)
        yield _family(
            GaugeMetricFamily,
            "cache_hit_rate",
            "Part of the prompt tokens found in the radix cache.",
            _ratios(_totals(metrics.prefix_hits), _totals(metrics.prefix_queries)),
        )
        yield _family(
            GaugeMetricFamily,
            "spec_accept_length",
            "Mean of the tokens committed in a round.",
            _ratios(_totals(metrics.accept_length, "_sum"), _totals(metrics.accept_length, "_count")),
        )
        yield _family(
            GaugeMetricFamily,
            "spec_accept_rate",
            "Part of the draft tokens verified that were accepted.",
            _ratios(_totals(metrics.accepted_tokens), _totals(metrics.draft_tokens)),
        )


def _totals(source: MetricWrapperBase, suffix: str = "_total", **labels: str) -> dict[str, float]:
    """By model, over all samples of that suffix and those labels."""
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
