"""The gateway's process: builds the gateway and serves both doors until it is stopped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

from starlette.routing import Route, Router

from gateway.core.catalogue import Catalogue
from gateway.core.gate import Gate, LogprobQuota
from gateway.core.metrics import GatewayMetrics, SglangNames
from gateway.core.router import Replica
from gateway.core.router import Router as VerifyRouter
from gateway.core.service import Gateway
from gateway.http.app import HostRule, RestApp
from gateway.http.info import InfoRoutes
from gateway.http.responses import DOOR
from gateway.http.server import HttpServer
from gateway.servicer import DOOR as GRPC_DOOR
from gateway.servicer import SERVICE_NAME, GatewayServicer
from outrider.config.base import parse_options
from outrider.config.gateway import GatewayOptions
from outrider.logs import get_logger
from outrider.rpc.credentials import TokenSource, peer_tokens
from outrider.rpc.lifecycle import run_service, write_ready_file
from outrider.rpc.peers import PeerAddresses
from outrider.rpc.server import GrpcServer, door_options, peer_source
from outrider.rpc.tls import TlsSource
from outrider.rpc.transport import DEFAULT_MAX_MESSAGE_BYTES, is_local
from outrider.v1.gateway_pb2_grpc import add_GatewayServiceServicer_to_server

_logger = get_logger(__name__)

_READINESS_SECONDS = 0.05
"""Time between two checks whether the gateway is ready."""
_FAREWELL_SECONDS = 1.0
"""How long calls may still arrive from clients that do not know yet that the gateway is shutting down."""
_CANCEL_GRACE_SECONDS = 1.0
"""How long clients whose answers are cancelled have to read the error that says so."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway with options from the command line. Return the exit code."""
    # One prompt is tokenized at a time; a pool of threads would take cores from the model.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = parse_options(GatewayOptions, argv, prog="python -m gateway")
    return run_service(serve, options)


async def serve(options: GatewayOptions, stop: asyncio.Event) -> None:
    """Serve both doors until `stop`, then drain. Raises ConfigError."""
    options.check()
    api_keys = TokenSource("--api-key-file", options.api_key_file, options.read_api_keys)
    door = door_options(options, api_keys)
    gateway = build_gateway(options)
    grpc_server = GrpcServer(
        **door,
        service_names=[SERVICE_NAME],
        max_message_bytes=options.max_body_bytes,
        max_connections=options.max_connections,
        handshake_seconds=options.header_seconds,
        message_seconds=options.body_seconds,
        on_refused=partial(gateway.count_error, GRPC_DOOR),
    )
    add_GatewayServiceServicer_to_server(GatewayServicer(gateway, options), grpc_server.grpc)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.router.close)
        http_servers = _http_servers(gateway, options, api_keys, door["tls"])
        for server in http_servers:
            stack.push_async_callback(server.stop)
        address = await grpc_server.start()
        stack.push_async_callback(grpc_server.stop, 1.0)
        for server in http_servers:
            await server.start()
        rest_address, metrics_address = http_servers[0].address, http_servers[-1].address
        if not (api_keys or options.tls_ca or is_local(rest_address)):
            _logger.warning("anyone who can reach %s can use it; %s", rest_address, options.key_fix)
        gateway.router.start()
        scheme = "http" if door["tls"] is None else "https"
        _logger.info("REST on %s://%s, waiting for verify at %s", scheme, rest_address, ", ".join(options.verify))
        announce = partial(
            write_ready_file,
            options.ready_file,
            address=address,
            rest_address=rest_address,
            metrics_address=metrics_address,
        )
        await _follow_readiness(gateway, grpc_server, stop, announce)
        await _drain(gateway, grpc_server, options.drain_seconds)


def _http_servers(
    gateway: Gateway, options: GatewayOptions, api_keys: TokenSource, tls: TlsSource | None
) -> list[HttpServer]:
    """Return the REST door and, with --metrics-address, the server of a separate metrics page. Raises ConfigError."""
    app = RestApp(gateway, options, api_keys=api_keys)
    rest = HttpServer(app, options.rest_address, option="--rest-address", options=options, tls=tls)
    rest.connections.on_refused = partial(gateway.count_error, DOOR)
    page = options.metrics_address
    if not page:
        return [rest]
    # Beyond loopback, a scraper calls the page by names other than those that clients use.
    rule = HostRule(page, options.allowed_hosts if is_local(page) else ())
    metrics = rule.guard(Router([Route("/metrics", InfoRoutes(gateway).metrics)]))
    return [rest, HttpServer(metrics, page, option="--metrics-address", options=options)]


def build_gateway(options: GatewayOptions) -> Gateway:
    """Build the parts of a gateway without starting them. Call this inside the event loop. Raises ConfigError."""
    catalogue = Catalogue(options)
    token = peer_tokens(options, "verify")
    tls = peer_source(options, "verify")
    connect = partial(
        Replica,
        auth_token=token,
        tls=tls,
        probe_seconds=options.probe_seconds,
        # --max-body-bytes is for clients: token ids and log-probabilities take more bytes than text.
        max_message_bytes=max(DEFAULT_MAX_MESSAGE_BYTES, options.max_body_bytes),
    )
    addresses = PeerAddresses(options.verify, "--verify", seconds=options.dns_seconds)
    router = VerifyRouter(addresses, connect, affinity_tokens=options.affinity_tokens, accept=catalogue.accept)
    metrics = GatewayMetrics()
    if options.sglang_metrics:
        metrics.registry.register(SglangNames(metrics))
    return Gateway(catalogue, router, Gate(options.max_answers), metrics, LogprobQuota(options.max_logprobs))


async def _follow_readiness(
    gateway: Gateway, server: GrpcServer, stop: asyncio.Event, announce: Callable[[], None]
) -> None:
    """Have the health service report readiness until `stop`; call `announce` when the gateway is first ready."""
    serving = announced = False
    while not stop.is_set():
        if gateway.ready != serving:
            serving = gateway.ready
            server.set_serving(serving)
        if serving and not announced:
            announced = True
            announce()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _READINESS_SECONDS)


async def _drain(gateway: Gateway, server: GrpcServer, seconds: float) -> None:
    """Refuse new requests, and wait until the running ones are done or out of time.

    gRPC clients are told to go away at once: their next call finds another gateway, if there is one. The REST door
    stays open to refuse requests, and closes the connection with each refusal.
    """
    gateway.gate.draining = True
    server.set_serving(False)
    _logger.info("draining for at most %g s; requests: %d", seconds, gateway.gate.num_requests)
    leaving = asyncio.create_task(server.stop(seconds + _CANCEL_GRACE_SECONDS))
    # Calls that were already on their way are still served. Without connections this ends at once.
    clock = asyncio.get_running_loop().time
    began = clock()
    await asyncio.wait([leaving], timeout=min(_FAREWELL_SECONDS, seconds))
    if not await gateway.gate.drain(max(0.0, began + seconds - clock())):
        _logger.warning("the drain time is over; requests cancelled: %d", gateway.gate.num_requests)
        gateway.router.end_answers()
        await gateway.gate.drain(_CANCEL_GRACE_SECONDS)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
