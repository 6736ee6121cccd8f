"""Names of all series that the services export, read from their registries, and those that an expression asks for."""

from __future__ import annotations

import re
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from draft_service.door.metrics import DraftMetrics
from draft_service.frames import DraftEngineState
from draft_service.main import watch
from gateway.core.metrics import GatewayMetrics
from verify_service.door.metrics import VerifyMetrics
from verify_service.frames import DraftStatus, Snapshot

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_NAME = re.compile(r"\b(?:vllm:|outrider_|process_)\w+")


def exported() -> set[str]:
    """Of gateway, verify and draft."""
    return set().union(*map(names_of, registries()))


def registries() -> tuple[CollectorRegistry, ...]:
    """Of gateway, verify and draft."""
    return GatewayMetrics().registry, _verify(), _draft()


def asked(expression: str) -> set[str]:
    """Names of ours that a PromQL expression reads."""
    return set(_NAME.findall(expression))


def names_of(registry: CollectorRegistry) -> set[str]:
    return {family.name + suffix for family in registry.collect() for suffix in _SUFFIXES.get(family.type, ("",))}


def _verify() -> CollectorRegistry:
    metrics = VerifyMetrics()
    snapshot = Snapshot(drafts=[DraftStatus("far:1", True, 0.002)], cost={1: 0.01}, declined={"memory": 0})
    backlog = SimpleNamespace(num_tokens=0, refused={"requests": 0, "tokens": 0}, slow_readers=0)
    engine = SimpleNamespace(snapshot=snapshot, num_running=0, num_waiting=0, num_healthy=0, backlog=backlog)
    metrics.watch(engine, [SimpleNamespace(address="far:1", state="connected")])  # type: ignore[arg-type, list-item]
    return metrics.registry


def _draft() -> CollectorRegistry:
    metrics = DraftMetrics(("ngram",))
    watch(metrics, SimpleNamespace(state=DraftEngineState()), SimpleNamespace(num_sessions=0), ("shared_trie_nodes",))  # type: ignore[arg-type]
    return metrics.registry
