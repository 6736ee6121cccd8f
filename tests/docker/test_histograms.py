"""Every histogram has finite bounds for what is usual, and beyond what options allow, as docs/operations.md says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from exported import registries
from prometheus_client import CollectorRegistry

from gateway.core.request import MAX_PROMPT_TOKENS
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")


def last_bounds(registry: CollectorRegistry) -> dict[str, float]:
    """Of each histogram. One with labels has no samples before it is used, so that its bounds are looked up."""
    found: dict[str, float] = {}
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if family.type != "histogram":
                continue
            bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
            if not bounds:
                bounds = [float(bound) for bound in collector._kwargs["buckets"]]  # type: ignore[attr-defined]
            found[family.name] = max(bound for bound in bounds if bound != float("inf"))
    return found


def documented() -> dict[str, tuple[list[float], float]]:
    """What was seen of each histogram, and its last bound."""
    table = TEXT.split("### Histograms")[1].split("\n## ")[0]
    found: dict[str, tuple[list[float], float]] = {}
    for names, on_cpu, on_gpu, last in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \| (\d+) \|$", table, re.MULTILINE):
        seen = [float(number) for number in re.findall(r"[\d.]+", f"{on_cpu} {on_gpu}")]
        found |= {name: (seen, float(last)) for name in re.findall(r"`([a-z0-9_:]+)`", names)}
    return found


def maximum(options: type, name: str) -> float:
    (found,) = (field.metadata["maximum"] for field in fields(options) if field.name == name)
    return float(found)


def test_the_last_finite_bound_is_the_documented_one_and_beyond_what_is_seen() -> None:
    bounds = {name: bound for registry in registries() for name, bound in last_bounds(registry).items()}
    table = documented()
    assert {name: last for name, (_, last) in table.items()} == bounds
    assert all(max(seen, default=0) <= last / 5 for seen, last in table.values())


def test_bounds_cover_what_options_allow() -> None:
    table = documented()
    longest = maximum(GatewayOptions, "max_request_seconds")
    most_nodes = maximum(VerifyOptions, "max_draft_tokens")
    for name, (_, last) in table.items():
        if name.startswith("vllm:"):
            assert last >= (MAX_PROMPT_TOKENS if name.endswith("_tokens") else longest), name
        elif name.endswith("draft_tokens"):
            assert last >= most_nodes, name
        elif name.endswith("accept_length"):
            assert last >= most_nodes + 1, name
