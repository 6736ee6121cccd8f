"""Starts a draft service: the engine process, and its door with gRPC and metrics. Torch-free."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from draft_service.door.metrics import DraftMetrics
from draft_service.door.remote import RemoteDraftEngine, RemoteFeatures
from draft_service.door.servicer import DraftServicer
from draft_service.frames import DrafterProfile
from outrider.config.base import parse_options
from outrider.config.draft import DraftOptions
from outrider.errors import EXIT_FAILURE, EXIT_OK
from outrider.host.process import EngineProcess, switch_threads_often
from outrider.logs import get_logger
from outrider.metrics import serve_metrics
from outrider.models.drafters.kinds import drafters_of_service
from outrider.rpc.credentials import door_tokens
from outrider.rpc.lifecycle import run_service, write_ready_file
from outrider.rpc.server import GrpcServer, check_free, door_options
from outrider.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server

_logger = get_logger(__name__)

ENGINE_MODULE = "draft_service.engine.worker"
_GC_THRESHOLD = 50_000
"""The door's messages are many small objects without cycles, so the collector need not run often."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; return the process's exit code."""
    return run_service(serve, parse_options(DraftOptions, argv, prog="python -m draft_service"))


async def serve(options: DraftOptions, stop: asyncio.Event) -> int:
    """Serve until `stop` is set, then drain. Return the exit code. Raises ConfigError."""
    options.check()
    switch_threads_often()
    server_options = door_options(options, door_tokens(options))
    check_free(options.address)
    if options.metrics_address:
        check_free(options.metrics_address, "--metrics-address")
    options = drafters_of_service(options)
    if warning := options.unused():
        _logger.warning("%s", warning)
    process, engine, features = await start_engine(options)
    try:
        profile = await process.ready(stop)
        if profile is None:
            return EXIT_OK
        metrics = DraftMetrics(profile.hello.sources)
        engine.on_state = metrics.take
        servicer = DraftServicer(engine, features, profile, options, metrics)
        watch(metrics, engine, servicer, profile.gauges)
        server = GrpcServer(
            **server_options,
            service_names=["outrider.v1.DraftService"],
            for_peers=True,
            max_message_bytes=options.max_message_bytes,
            allow_unknown_fields=["/outrider.v1.DraftService/Speculate", "/outrider.v1.DraftService/Features"],
        )
        add_DraftServiceServicer_to_server(servicer, server.grpc)
        try:
            address = await server.start()
            with serve_metrics(options.metrics_address, metrics.registry) as metrics_address:
                gc.collect()
                gc.freeze()
                gc.set_threshold(_GC_THRESHOLD)
                server.set_serving(True)
                write_ready_file(
                    options.ready_file,
                    address=address,
                    metrics_address=metrics_address,
                    drafters=profile.hello.model,
                )
                await process.until_stopped(stop, options.watchdog_timeout)
                server.set_serving(False)
                with suppress(TimeoutError):
                    await asyncio.wait_for(engine.drain(), options.drain_seconds)
        finally:
            await server.stop(grace=0)
        if not engine.alive:
            return EXIT_FAILURE
        await process.stop()
        return EXIT_OK
    finally:
        await process.close()


async def start_engine(
    options: DraftOptions,
) -> tuple[EngineProcess[DrafterProfile], RemoteDraftEngine, RemoteFeatures]:
    """Start the engine process, without waiting until it has loaded its drafters. Call this on the main thread."""
    engine, features = RemoteDraftEngine(), RemoteFeatures()
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(options.threads))
    # The engine opens no door: it needs no tokens.
    process = await EngineProcess.start(ENGINE_MODULE, replace(options, auth_token=""), engine, [features], threads)
    return process, engine, features


def watch(metrics: DraftMetrics, engine: RemoteDraftEngine, servicer: DraftServicer, gauges: Iterable[str]) -> None:
    """Add gauges of what is open now; `gauges` names those of the drafter."""
    metrics.watch("outrider_draft_open_requests", "Open requests.", lambda: engine.state.num_requests)
    metrics.watch("outrider_draft_sessions", "Sessions with verify replicas.", lambda: servicer.num_sessions)
    metrics.watch("outrider_draft_live_nodes", "Live nodes in all trees.", lambda: engine.state.num_nodes)
    for name in gauges:
        help = f"{name.replace('_', ' ').capitalize()} of the drafter."
        metrics.watch(f"outrider_draft_{name}", help, lambda name=name: engine.state.gauges.get(name, 0))  # type: ignore[misc]
