"""Starts a verify service: model, pages, engine, sessions with drafts, and the gRPC door."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from outrider import __version__
from outrider.cache.kv import KVCache
from outrider.config.base import parse_options
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError
from outrider.logs import get_logger
from outrider.metrics import MetricsPage
from outrider.models.base import CausalLM
from outrider.models.loader import load_model
from outrider.models.progress import ConsoleProgress
from outrider.models.store import resolve_model, served_name
from outrider.rpc.lifecycle import run_service, write_ready_file
from outrider.rpc.server import GrpcServer, check_free
from outrider.rpc.transport import unix_path
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.messages import PROTOCOL_VERSION, Hello
from outrider.v1 import verify_pb2, verify_pb2_grpc
from verify_service.admission import Admission
from verify_service.budget import CostModel
from verify_service.dtype import choose_dtype
from verify_service.engine import Engine, EngineLimits
from verify_service.executor import TorchExecutor
from verify_service.memory import Memory
from verify_service.metrics import VerifyMetrics, num_healthy
from verify_service.servicer import VerifyServicer
from verify_service.session import DraftDialer

log = get_logger(__name__)

SERVICE = "outrider.v1.VerifyService"
_MOST_AUTO_TOKENS = 65536
_MEMORY_SHARE = 0.25


def main(argv: list[str] | None = None) -> int:
    """Run the service until SIGTERM; returns the exit code."""
    return run_service(serve, parse_options(VerifyOptions, argv, prog="python -m verify_service"))


async def serve(options: VerifyOptions, stop: asyncio.Event) -> int:
    """Serve with the model until `stop` is set. Returns the exit code; raises ConfigError."""
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    # Sessions are served between two steps of a busy engine thread: let them have the interpreter soon.
    sys.setswitchinterval(0.0005)
    if unix_path(options.address) is None:
        # Before the model is loaded, which may take minutes.
        check_free(options.address, "--address")
    metrics = VerifyMetrics()
    with MetricsPage(options.metrics_address, metrics.registry) as metrics_address:
        return await _serve_model(options, stop, metrics, metrics_address)


async def _serve_model(
    options: VerifyOptions, stop: asyncio.Event, metrics: VerifyMetrics, metrics_address: str
) -> int:
    """Load, warm up, serve, drain."""
    path, model = await asyncio.to_thread(_load, options)
    memory, executor, cost = await asyncio.to_thread(_warm_up, options, model)
    limits = _limits(options, path, model, memory)
    engine = Engine(executor, memory, cost, limits, metrics)
    info = _info(options, path, model, limits)
    dialers = [DraftDialer(address, _hello(info), engine) for address in options.draft if not options.no_speculation]
    metrics.watch(engine, dialers)
    admission = Admission(limits.vocab_size, limits.context_length, model.config.eos_token_ids, bool(dialers))
    servicer = VerifyServicer(engine, admission, info, lambda: _load_report(engine, metrics))
    server = GrpcServer(address=options.address, service_names=[SERVICE])
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server.grpc)
    address = await server.start()
    engine.start()
    sessions = [asyncio.create_task(dialer.run()) for dialer in dialers]
    server.set_serving(True)
    write_ready_file(options.ready_file, address=address, metrics_address=metrics_address)
    await _until_stopped(stop, engine)
    servicer.draining = True
    await server.stop(options.drain_seconds if engine.alive else 0)
    for session in sessions:
        session.cancel()
    await asyncio.gather(*sessions, return_exceptions=True)
    healthy = engine.alive
    await asyncio.to_thread(engine.stop)
    return 0 if healthy else 1


async def _until_stopped(stop: asyncio.Event, engine: Engine) -> None:
    """Return when told to stop, or when the engine died: a supervisor then starts the service anew."""
    while not stop.is_set() and engine.alive:
        try:
            await asyncio.wait_for(stop.wait(), timeout=0.5)
        except TimeoutError:
            continue


def _load(options: VerifyOptions) -> tuple[Path, CausalLM]:
    path = resolve_model(options.model)
    with ConsoleProgress() as progress:
        model = load_model(
            path, choose_dtype(options.dtype), progress=lambda done, total: progress("loading weights", done, total)
        )
    return path, model


def _warm_up(options: VerifyOptions, model: CausalLM) -> tuple[Memory, TorchExecutor, CostModel]:
    tokens = options.max_total_tokens or _auto_tokens(model)
    num_pages = tokens // options.page_size
    if num_pages * options.page_size < 512:
        raise ConfigError(f"--max-total-tokens: {tokens} tokens are too few to warm up; allow at least 512")
    memory = Memory(num_pages, options.page_size, keep_prefixes=not options.disable_radix_cache)
    executor = TorchExecutor(model, num_pages * options.page_size)
    cost = CostModel.measured(executor.measure)
    rows = ", ".join(f"{width}: {seconds * 1e3:.1f}" for width, seconds in cost.table().items())
    log.info("KV cache of %d tokens; ms of a forward by tokens: %s", num_pages * options.page_size, rows)
    return memory, executor, cost


def _auto_tokens(model: CausalLM) -> int:
    """KV tokens that a quarter of the free memory holds, within what one CPU can use."""
    config = model.config
    bytes_per_token = KVCache.bytes_per_slot(config.num_layers, config.num_kv_heads, config.head_dim, model.dtype)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(int(free * _MEMORY_SHARE) // bytes_per_token, _MOST_AUTO_TOKENS), 1024)


def _limits(options: VerifyOptions, path: Path, model: CausalLM, memory: Memory) -> EngineLimits:
    """A lone request must always fit, tree included, or preemption could not make room for it."""
    room = memory.num_pages * memory.page_size - options.max_draft_tokens - memory.page_size
    most = min(model.config.max_positions, room)
    if most < 2:
        raise ConfigError(
            f"--max-total-tokens: {memory.num_pages * memory.page_size} leave no room beside "
            f"{options.max_draft_tokens} draft tokens; raise it or lower --max-draft-tokens"
        )
    if options.context_length > most:
        raise ConfigError(
            f"--context-length: {options.context_length} is over {most}, which model and KV cache allow; lower it, or "
            f"raise --max-total-tokens if that is the limit"
        )
    return EngineLimits(
        # Output matrices are often padded past the tokenizer; what has no text is never sampled.
        vocab_size=min(model.config.vocab_size, Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()),
        context_length=options.context_length or most,
        max_running=options.max_running_requests,
        max_waiting=options.max_queued_requests,
        chunk_size=options.chunked_prefill_size,
        max_nodes=options.max_draft_tokens,
        max_hold_seconds=options.max_hold_ms / 1e3,
    )


def _info(
    options: VerifyOptions, path: Path, model: CausalLM, limits: EngineLimits
) -> verify_pb2.VerifyServiceGetInfoResponse:
    return verify_pb2.VerifyServiceGetInfoResponse(
        model=options.served_model_name or served_name(options.model),
        model_path=str(path),
        tokenizer_hash=hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest(),
        vocab_size=limits.vocab_size,
        context_length=limits.context_length,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=model.config.eos_token_ids,
        version=__version__,
    )


def _hello(info: verify_pb2.VerifyServiceGetInfoResponse) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        model=info.model,
        tokenizer_hash=info.tokenizer_hash,
        vocab_size=info.vocab_size,
        max_positions=info.context_length,
    )


def _load_report(engine: Engine, metrics: VerifyMetrics) -> verify_pb2.VerifyServiceGetLoadResponse:
    return verify_pb2.VerifyServiceGetLoadResponse(
        num_running=len(engine.scheduler.running),
        num_waiting=len(engine.scheduler.waiting),
        num_pages_used=engine.memory.num_used,
        num_pages=engine.memory.num_pages,
        tokens_per_second=metrics.tokens_per_second,
        num_healthy_drafts=num_healthy(engine),
    )
