"""The draft service's process."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from draft_service.drafters.base import build_drafter
from draft_service.drafters.model import find_mapper
from draft_service.engine import Engine
from draft_service.metrics import DraftMetrics
from draft_service.servicer import DraftServicer
from outrider.config.base import parse_options
from outrider.config.draft import AUTO, DraftOptions
from outrider.cpu_kernels import KERNEL_CACHES
from outrider.errors import ConfigError
from outrider.logs import get_logger
from outrider.metrics import MetricsPage
from outrider.models.shipped import choose_drafters
from outrider.rpc.door import door_options
from outrider.rpc.lifecycle import run_service, write_ready_file
from outrider.rpc.server import GrpcServer
from outrider.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server

_logger = get_logger(__name__)

_SWITCH_SECONDS = 0.0001
"""How long the event loop and the engine's thread may wait for each other; its own 5 ms are longer than a burst."""
_GC_THRESHOLD = 50_000
"""Tries are many small objects without cycles: look at them seldom."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the process's exit code."""
    return run_service(serve, parse_options(DraftOptions, argv, prog="python -m draft_service"))


async def serve(options: DraftOptions, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then drain."""
    options.check()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    for name, value in KERNEL_CACHES.items():
        os.environ.setdefault(name, value)
    sys.setswitchinterval(_SWITCH_SECONDS)
    was_open = options.speculative_algorithm == AUTO
    options = _choose(options)
    drafter = build_drafter(options)
    metrics = DraftMetrics(drafter.sources)
    engine = Engine(drafter, options, metrics)
    servicer = DraftServicer(engine, drafter, options, metrics, find_mapper(drafter), may_leave_out=was_open)
    watch(metrics, engine, servicer)
    server = GrpcServer(
        **door_options(options, options.read_auth_tokens()),
        service_names=["outrider.v1.DraftService"],
        for_peers=True,
        max_message_bytes=options.max_message_bytes,
        allow_unknown_fields=["/outrider.v1.DraftService/Speculate", "/outrider.v1.DraftService/Features"],
    )
    add_DraftServiceServicer_to_server(servicer, server.grpc)
    engine.start()
    try:
        address = await server.start()
        with MetricsPage(options.metrics_address, metrics.registry) as metrics_address:
            _settle_memory()
            server.set_serving(True)
            write_ready_file(options.ready_file, address=address, metrics_address=metrics_address)
            await stop.wait()
            server.set_serving(False)
            await drain(engine, options.drain_seconds)
            await server.stop(grace=0)
    finally:
        await server.stop(grace=0)
        await asyncio.to_thread(engine.stop)


def _choose(options: DraftOptions) -> DraftOptions:
    """Drafters in the place of AUTO.

    A draft model of which nobody has said what it is does not end the service: a supervisor would start it with the
    same options again, for ever.
    """
    try:
        return choose_drafters(options)
    except ConfigError as error:
        _logger.error(
            "n-grams alone draft, and %s is not used: %s", options.speculative_draft_model_path, error.message
        )
        return replace(options, speculative_algorithm=("NGRAM",), speculative_draft_model_path="")


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


async def drain(engine: Engine, seconds: float) -> None:
    """Open nothing more and wait until the open requests are closed, at most so long."""
    loop = asyncio.get_running_loop()
    drained = asyncio.Event()
    engine.drain(partial(loop.call_soon_threadsafe, drained.set))
    with suppress(TimeoutError):
        await asyncio.wait_for(drained.wait(), seconds)


def watch(metrics: DraftMetrics, engine: Engine, servicer: DraftServicer) -> None:
    """Add the gauges of what is open now."""
    requests = engine.requests
    metrics.watch("outrider_draft_open_requests", "Open requests.", lambda: len(requests))
    metrics.watch("outrider_draft_sessions", "Sessions with verify replicas.", lambda: servicer.num_sessions)
    metrics.watch("outrider_draft_live_nodes", "Live nodes in all trees.", lambda: requests.growth.num_live)
    for name in engine.drafter.gauges():
        help = f"{name.replace('_', ' ').capitalize()} of the drafter."
        metrics.watch(f"outrider_draft_{name}", help, partial(_gauge, engine, name))


def _gauge(engine: Engine, name: str) -> float:
    return engine.drafter.gauges()[name]
