"""Starts a verify service: the engine process, and its door with gRPC, sessions with drafts and metrics. Torch-free."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from outrider.config.base import expand, parse_options
from outrider.config.verify import VerifyOptions
from outrider.errors import EXIT_FAILURE, EXIT_OK, UnavailableError, under
from outrider.host.process import EngineProcess, switch_threads_often
from outrider.logs import get_logger
from outrider.metrics import serve_metrics
from outrider.protocol.generation import VerifyLoad
from outrider.rpc.channel import open_channel
from outrider.rpc.credentials import door_tokens, peer_tokens
from outrider.rpc.lifecycle import run_service, write_ready_file
from outrider.rpc.peers import PeerAddresses
from outrider.rpc.server import GrpcServer, check_free, door_options, peer_source
from outrider.v1 import verify_pb2_grpc
from verify_service.door.admission import Admission
from verify_service.door.dialer import DraftDialer, DraftDialers
from verify_service.door.grammar_checker import GrammarChecker
from verify_service.door.metrics import VerifyMetrics
from verify_service.door.remote import RemoteVerifyEngine
from verify_service.door.servicer import VerifyServicer
from verify_service.frames import RoundReport, TargetProfile

_logger = get_logger(__name__)

SERVICE = "outrider.v1.VerifyService"
ENGINE_MODULE = "verify_service.engine.worker"
CANCEL_GRACE_SECONDS = 2.0
"""Extra time after a drain for cut-off answers to deliver their status; the server stops as soon as they have."""


def main(argv: list[str] | None = None) -> int:
    """Run the service until SIGTERM; returns the exit code."""
    return run_service(serve, parse_options(VerifyOptions, argv, prog="python -m verify_service"))


async def serve(options: VerifyOptions, stop: asyncio.Event) -> int:
    """Serve with the model until `stop` is set. Returns the exit code; raises ConfigError."""
    options.check()
    switch_threads_often()
    # Fail on these before the model is loaded, which may take minutes.
    server_options, token = door_options(options, door_tokens(options)), peer_tokens(options, "draft")
    dial = partial(open_channel, auth_token=token, tls=peer_source(options, "draft"), option="--draft")
    check_free(options.address)
    drafts = () if options.no_speculation else options.draft
    addresses = PeerAddresses(drafts, "--draft", seconds=options.dns_seconds)
    metrics = VerifyMetrics()
    with serve_metrics(options.metrics_address, metrics.registry) as metrics_address:
        process, engine = await start_engine(options, metrics.observe)
        try:
            # While the engine's process imports torch.
            await asyncio.to_thread(check_given, options.model)
            served = await process.ready(stop)
            if served is None:
                return EXIT_OK
            speculates = bool(addresses or (options.speculative_algorithm and not options.no_speculation))
            hello = served.hello()
            dialers = DraftDialers(addresses, lambda address: DraftDialer(address, hello, engine, dial=dial))
            ranks = options.tensor_parallel_size
            metrics.watch(engine, dialers, ranks)
            engine.backlog.max_tokens = options.max_queued_tokens
            info = served.info
            grammars = GrammarChecker(info.model_path, info.vocab_size, info.eos_token_ids)
            servicer = VerifyServicer(
                engine,
                Admission(info.vocab_size, info.context_length, info.eos_token_ids, speculates),
                info,
                lambda: _load_report(engine, metrics),
                stall_seconds=options.unread_seconds,
                grammars=grammars,
            )
            server = GrpcServer(**server_options, service_names=[SERVICE], for_peers=True)
            verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server.grpc)
            address = await server.start()
            sessions = asyncio.create_task(dialers.run())
            server.set_serving(True)
            write_ready_file(
                options.ready_file,
                address=address,
                metrics_address=metrics_address,
                model=info.model,
                dtype=info.dtype,
                context_length=str(info.context_length),
                device=served.device + (f" and {ranks - 1} more" if ranks > 1 else ""),
                drafters="+".join(served.drafters),
            )
            await process.until_stopped(stop, options.watchdog_timeout)
            servicer.draining = True
            await drain(server, engine, options.drain_seconds if engine.alive else 0)
            sessions.cancel()
            await asyncio.gather(sessions, return_exceptions=True)
            await grammars.close()
            healthy = engine.alive
            await process.stop()
            return EXIT_OK if healthy else EXIT_FAILURE
        finally:
            await process.close()


def check_given(model: str) -> None:
    """Raise ConfigError for a local folder that holds no model with a tokenizer, as far as it shows without torch."""
    # Imported here: it takes a while.
    from outrider.models.store_folder import check_model_folder, count_tokens

    folder = expand(model)
    if os.path.isdir(folder):
        with under("--model"):
            check_model_folder(folder)
            count_tokens(folder)


async def drain(server: GrpcServer, engine: RemoteVerifyEngine, seconds: float) -> None:
    """Stop the server. Answers still running after `seconds` are ended with an error."""
    if seconds:
        _logger.info("draining for at most %g s; requests: %d", seconds, engine.num_requests)
    leaving = asyncio.create_task(server.stop(seconds + CANCEL_GRACE_SECONDS))
    await asyncio.wait([leaving], timeout=seconds)
    reason = "the verify service is shutting down and its drain time is over; try again"
    if num_ended := engine.end_answers(UnavailableError(reason, code="draining")):
        _logger.warning("the drain time is over; requests cancelled: %d", num_ended)
    await leaving


async def start_engine(
    options: VerifyOptions, on_round: Callable[[RoundReport], None]
) -> tuple[EngineProcess[TargetProfile], RemoteVerifyEngine]:
    """Start the engine process, which then loads its model; it is not ready yet. Call this on the main thread."""
    engine = RemoteVerifyEngine(on_round)
    # The engine neither listens nor dials, so it needs no tokens.
    process = await EngineProcess.start(ENGINE_MODULE, replace(options, auth_token="", draft_auth_token=""), engine)
    return process, engine


def _load_report(engine: RemoteVerifyEngine, metrics: VerifyMetrics) -> VerifyLoad:
    return VerifyLoad(
        num_running=engine.num_running,
        num_waiting=engine.num_waiting,
        num_pages_used=engine.snapshot.num_pages_used,
        num_pages=engine.snapshot.num_pages,
        tokens_per_second=metrics.tokens_per_second,
        num_healthy_drafts=engine.num_healthy,
    )
