"""Checks of running services: whether they serve, what they report of themselves, and how far away they are."""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import __version__
from outrider.cli.health import reachable
from outrider.config.gateway import GatewayOptions
from outrider.config.service import KEY_FIX, ServiceOptions, TlsFiles, peer_tls, peer_token
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, OutriderError, count_of, reason_of
from outrider.rpc.channel import open_channel
from outrider.rpc.peers import DNS_SCHEME, look_up, split_name
from outrider.rpc.status import error_from_rpc
from outrider.rpc.tls import TlsSource
from outrider.rpc.transport import is_local
from outrider.v1 import draft_pb2, draft_pb2_grpc, gateway_pb2, gateway_pb2_grpc, verify_pb2, verify_pb2_grpc
from outrider_tools.doctor import Finding, note, ok, problem, warning

ECHOES = 50
SLOW_LOCAL_MS, SLOW_MS = 3.0, 10.0
"""Median round trips that deserve a warning, on this machine and to another one."""


@dataclass(frozen=True)
class ServiceEndpoint:
    """A service to ask, and how to reach it."""

    service: str
    address: str
    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None


def endpoints_of(options: Mapping[str, ServiceOptions], gateway_tls: TlsFiles | None) -> list[ServiceEndpoint]:
    """Return the services that these options bind or call, each address once. Raises ConfigError for bad secrets."""
    gateway, verify = cast(GatewayOptions, options["gateway"]), cast(VerifyOptions, options["verify"])
    to_verify = peer_token(gateway, "verify")
    to_draft = peer_token(verify, "draft")
    found = [ServiceEndpoint("gateway", gateway.address, gateway.read_api_key(), gateway_tls)]
    found += [ServiceEndpoint("verify", address, to_verify, peer_tls(gateway, "verify")) for address in gateway.verify]
    found += [ServiceEndpoint("draft", address, to_draft, peer_tls(verify, "draft")) for address in verify.draft]
    found += [ServiceEndpoint("verify", verify.address, to_verify)]
    found += [ServiceEndpoint("draft", options["draft"].address, to_draft)] if "draft" in options else []
    once: dict[str, ServiceEndpoint] = {}
    for endpoint in found:
        once.setdefault(endpoint.address, endpoint)
    return [one for one in once.values() if one.address and not one.address.endswith(":0")]


async def check_services(
    endpoints: Sequence[ServiceEndpoint], must_run: bool, timeout: float
) -> tuple[list[Finding], dict[str, str]]:
    """Return findings, and which service answered at each address. `timeout` is the limit of each call, in seconds."""
    findings: list[Finding] = []
    spread = await asyncio.gather(*(_replicas(endpoint, must_run, timeout, findings) for endpoint in endpoints))
    once: dict[str, ServiceEndpoint] = {}
    for endpoint in itertools.chain.from_iterable(spread):
        once.setdefault(endpoint.address, endpoint)
    endpoints = list(once.values())
    answers = await asyncio.gather(*(_ask(endpoint, must_run, timeout) for endpoint in endpoints))
    findings += [finding for found, _ in answers for finding in found]
    serving = {
        endpoint.address: endpoint.service for endpoint, (_, there) in zip(endpoints, answers, strict=True) if there
    }
    return findings, serving


async def _replicas(
    endpoint: ServiceEndpoint, must_run: bool, timeout: float, findings: list[Finding]
) -> list[ServiceEndpoint]:
    """Return the endpoint itself, or one for each address of a DNS name. Findings say why a name has none."""
    if not endpoint.address.startswith(DNS_SCHEME):
        return [endpoint]
    try:
        host, port = split_name(endpoint.address, f"--{endpoint.service}")
        found = await asyncio.wait_for(look_up(host, port), timeout)
    except ConfigError as error:
        findings.append(problem(endpoint.service, error.message, "correct the option"))
    except (OSError, UnicodeError, TimeoutError) as error:
        text = f"{endpoint.address}: cannot be looked up: {reason_of(error) or 'no answer in time'}"
        found_none = problem(endpoint.service, text, "correct the name, or see whether its service runs")
        findings.append(found_none if must_run else note(endpoint.service, text))
    else:
        return [replace(endpoint, address=address) for address in sorted(found)]
    return []


async def _ask(endpoint: ServiceEndpoint, must_run: bool, timeout: float) -> tuple[list[Finding], bool]:
    said = endpoint.address
    try:
        source = TlsSource(endpoint.tls) if endpoint.tls is not None else None
        channel = open_channel(reachable(endpoint.address), auth_token=endpoint.token, tls=source)
    except ConfigError as error:
        return [problem(endpoint.service, error.message, "correct the option")], False
    async with channel:
        try:
            request = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            told = error_from_rpc(error, endpoint.service)
            if must_run:
                fix = "start it (outrider up), or correct its address and TLS"
                reason = re.sub(r"failed to connect to all addresses; last error: \w+: ", "", told.message)
                return [problem(endpoint.service, f"{said}: {reason}", fix)], False
            return [note(endpoint.service, f"{said}: does not run, or cannot be reached")], False
        findings = [await _echo(channel, endpoint, timeout)]
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        if status != "SERVING":
            fix = "wait if it is loading its model; else see its log"
            return [problem(endpoint.service, f"{said}: {status}", fix), *findings], True
        findings.insert(0, await _info(channel, endpoint, timeout))
        return findings, True


async def _info(channel: grpc.aio.Channel, endpoint: ServiceEndpoint, timeout: float) -> Finding:
    try:
        return await _INFO[endpoint.service](channel, endpoint.address, timeout)
    except grpc.aio.AioRpcError as error:
        told: OutriderError = error_from_rpc(error, endpoint.service)
        fix = "see its log"
        if "credentials" in told.code:
            fix = KEY_FIX if endpoint.service == "gateway" else "set the token that its door asks for"
        return problem(endpoint.service, f"{endpoint.address}: {told.message}", fix)


async def _gateway_info(channel: grpc.aio.Channel, said: str, timeout: float) -> Finding:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    answer = await stub.ListModels(gateway_pb2.GatewayServiceListModelsRequest(), timeout=timeout)
    models = ", ".join(f"{model.id} (context {model.context_length})" for model in answer.models)
    return ok("gateway", f"{said}: serves {models}")


async def _verify_info(channel: grpc.aio.Channel, said: str, timeout: float) -> Finding:
    stub = verify_pb2_grpc.VerifyServiceStub(channel)
    info = await stub.GetInfo(verify_pb2.VerifyServiceGetInfoRequest(), timeout=timeout)
    load = await stub.GetLoad(verify_pb2.VerifyServiceGetLoadRequest(), timeout=timeout)
    text = (
        f"{said}: {info.model}, {info.dtype}, context {info.context_length}, tokenizer {info.tokenizer_hash[:12]}, "
        f"{load.num_pages_used} of {load.num_pages} pages used, {count_of(load.num_healthy_drafts, 'healthy draft')}"
    )
    alone = "" if load.num_healthy_drafts else "tokens come at plain speed; its log says why no draft is used"
    return _judge("verify", text, info.version, alone)


async def _draft_info(channel: grpc.aio.Channel, said: str, timeout: float) -> Finding:
    stub = draft_pb2_grpc.DraftServiceStub(channel)
    info = await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=timeout)
    text = (
        f"{said}: {', '.join(info.sources)}, {count_of(info.num_sessions, 'session')}, "
        f"{count_of(info.num_requests, 'request')}, {count_of(info.num_nodes, 'node')}"
    )
    alone = "" if info.num_sessions else "no verify service is connected: compare its --draft with this address"
    return _judge("draft", text, info.version, alone)


def _judge(service: str, text: str, release: str, alone: str) -> Finding:
    """Return a finding on a service's report. `alone` says what to do if the service has no partner, else nothing."""
    if release != __version__:
        return warning(service, f"{text}; release {release}, here {__version__}", "run one release everywhere")
    return warning(service, text, alone) if alone else ok(service, text)


_INFO: dict[str, Callable[[Any, str, float], Awaitable[Finding]]] = {
    "gateway": _gateway_info,
    "verify": _verify_info,
    "draft": _draft_info,
}


async def _echo(channel: grpc.aio.Channel, endpoint: ServiceEndpoint, timeout: float) -> Finding:
    """Measure round trips of health checks, the lightest call that every service answers."""
    stub = health_pb2_grpc.HealthStub(channel)
    times = []
    try:
        for _ in range(ECHOES):
            begin = time.perf_counter()
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
            times.append((time.perf_counter() - begin) * 1e3)
    except grpc.aio.AioRpcError as error:
        return problem(
            "round trip",
            f"{endpoint.service} {endpoint.address}: lost after {count_of(len(times), 'call')}: {error.details()}",
            "see its log",
        )
    median, worst = statistics.median(times), max(times)
    text = f"{endpoint.service} {endpoint.address}: median {median:.2f} ms, longest {worst:.2f} ms of {ECHOES}"
    limit = SLOW_LOCAL_MS if is_local(endpoint.address) else SLOW_MS
    if median > limit:
        cost = "a miss costs a round trip: " if endpoint.service == "draft" else ""
        return warning("round trip", f"{text}; over {limit:g} ms", f"{cost}look at load and network")
    return ok("round trip", text)
