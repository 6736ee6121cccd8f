"""From records to figures: latencies, throughput, acceptance, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.metrics import MetricsPage
from outrider_tools.bench.clients import LoadRun
from outrider_tools.bench.report import Row
from outrider_tools.bench.requests import RequestRecord

PERCENTILES = (50, 90, 99)
MAX_DEPTHS = 16
_DRAFTS = "vllm:spec_decode_num_drafts"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_GATEWAY_ROUNDS = "outrider_gateway_rounds"
_ACCEPT_LENGTH = "outrider_gateway_accept_length"


def spread_of(values: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Mean, percentiles and largest of values with weights; empty without any.

    A percentile is the least value up to which that share of the weight lies.
    """
    if not values:
        return {}
    found, weights = np.array([value for value, _ in values]), np.array([weight for _, weight in values])
    percentiles = np.percentile(found, PERCENTILES, weights=weights, method="inverted_cdf")
    return {
        "mean": float(np.average(found, weights=weights)),
        **{f"p{share}": float(value) for share, value in zip(PERCENTILES, percentiles, strict=True)},
        "max": float(found.max()),
    }


@dataclass(frozen=True)
class Acceptance:
    """What speculation brought over a run; `at_depth` holds the share of drafted rounds by depth, the first being 1."""

    accept_length: float
    at_depth: dict[int, float]


def acceptance(records: Sequence[RequestRecord], page: MetricsPage | None) -> Acceptance | None:
    """Of a run, from its records or, where they do not tell depths, from what the metrics page gained; None without.

    The page counts every client's requests, and is asked for that reason only where the door tells no origins.
    """
    rounds = sum(record.rounds for record in records)
    length = sum(record.tokens for record in records) / rounds if rounds else 0.0
    drafted = sum(record.drafted_rounds for record in records)
    if drafted:
        total: Counter[int] = Counter()
        for record in records:
            total.update(record.accepted_at)
        return Acceptance(length, {depth: count / drafted for depth, count in sorted(total.items())})
    if page is not None and page.total(_GATEWAY_ROUNDS):
        drafts = page.total(_DRAFTS)
        depths: Counter[int] = Counter()
        for labels, value in page.labelled(_PER_POSITION):
            depths[int(labels.rpartition(",")[2]) + 1] += round(value)
        shares = {depth: count / drafts for depth, count in sorted(depths.items()) if drafts}
        return Acceptance(length or page.histogram(_ACCEPT_LENGTH).mean, shares)
    return Acceptance(length, {}) if rounds else None


def errors_of(records: Iterable[RequestRecord]) -> Counter[str]:
    """Requests that failed, by code."""
    return Counter(record.error for record in records if record.error)


def rows_of(run: LoadRun, case: str, page: MetricsPage | None = None) -> list[Row]:
    """A run's result rows; `page` is what the gateway's metrics gained meanwhile."""
    return list(_rows(run, case, page))


def _rows(run: LoadRun, case: str, page: MetricsPage | None) -> Iterator[Row]:
    complete = [record for record in run.records if not record.error]
    ended = [record for record in complete if record.end <= run.window]
    window = run.window or 1e-9
    yield Row(case, "requests", len(run.records), "")
    yield Row(case, "failed", len(run.records) - len(complete), "")
    for code, count in sorted(errors_of(run.records).items()):
        yield Row(case, f"failed_{code}", count, "")
    yield Row(case, "seconds", run.window, "s")
    yield Row(case, "requests_per_second", len(ended) / window, "requests/s")
    came = sum(count for record in run.records for at, count in record.arrivals if at <= run.window)
    yield Row(case, "tokens_per_second", came / window, "tokens/s")
    yield Row(case, "prompt_tokens_per_second", sum(record.prompt_tokens for record in ended) / window, "tokens/s")
    yield Row(case, "prompt_tokens", sum(record.prompt_tokens for record in complete), "tokens")
    yield Row(case, "cached_prompt_tokens", sum(record.cached_tokens for record in complete), "tokens")
    yield Row(case, "completion_tokens", sum(record.tokens for record in complete), "tokens")
    gaps = [gap for record in complete for gap in record.gaps()]
    for name, values in (
        ("ttft_ms", [(record.ttft, 1) for record in complete if record.ttft is not None]),
        ("itl_ms", [(gap / count, count) for gap, count in gaps]),
        ("message_gap_ms", [(gap, 1) for gap, _ in gaps]),
        ("tpot_ms", [(record.tpot, 1) for record in complete if record.tpot is not None]),
        ("e2e_ms", [(record.latency, 1) for record in complete]),
    ):
        for part, value in spread_of(values).items():
            yield Row(case, f"{name}_{part}", value * 1e3, "ms")
    yield from _speculation(run, case, page)
    yield Row(case, "client_cpu_share", run.cpu_seconds / max(run.window, 1e-9), "cores")


def _speculation(run: LoadRun, case: str, page: MetricsPage | None) -> Iterator[Row]:
    complete = [record for record in run.records if not record.error]
    found = acceptance(complete, page)
    if found is None:
        return
    yield Row(case, "accept_length", found.accept_length, "tokens")
    drafted = sum(record.draft_tokens for record in complete)
    if drafted:
        share = sum(record.accepted_tokens for record in complete) / drafted
        yield Row(case, "accepted_over_draft_tokens", share, "ratio")
    for depth, value in found.at_depth.items():
        if depth <= MAX_DEPTHS:
            yield Row(case, f"accept_rate_depth_{depth}", value, "ratio")
