"""Checks of services: whether their doors are free and who can reach them; and of running services, whether they serve,
what they report of themselves, and how far away they are."""

from __future__ import annotations

import asyncio
import errno
import itertools
import operator
import os
import re
import socket
import stat
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import __version__
from outrider.cli.cluster import ADDRESS_FIELDS, MODULES, ServiceFlag, flag_names, is_default, service_flags
from outrider.cli.health import reachable
from outrider.config.base import expand
from outrider.config.gateway import GatewayOptions
from outrider.config.service import KEY_FIX, ServiceOptions, TlsFiles, peer_tls, peer_token
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, OutriderError, count_of, reason_of
from outrider.rpc.channel import open_channel
from outrider.rpc.peers import DNS_SCHEME, look_up, split_name
from outrider.rpc.server import bind_error, bind_fix
from outrider.rpc.status import error_from_rpc
from outrider.rpc.tls import TlsSource
from outrider.rpc.transport import check_address, is_local, split_host_port, unix_path
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
    address = endpoint.address
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
            failure = error_from_rpc(error, endpoint.service)
            if must_run:
                fix = "start it (outrider up), or correct its address and TLS"
                reason = re.sub(r"failed to connect to all addresses; last error: \w+: ", "", failure.message)
                return [problem(endpoint.service, f"{address}: {reason}", fix)], False
            return [note(endpoint.service, f"{address}: does not run, or cannot be reached")], False
        findings = [await _echo(channel, endpoint, timeout)]
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        if status != "SERVING":
            fix = "wait if it is loading its model; else see its log"
            return [problem(endpoint.service, f"{address}: {status}", fix), *findings], True
        findings.insert(0, await _info(channel, endpoint, timeout))
        return findings, True


async def _info(channel: grpc.aio.Channel, endpoint: ServiceEndpoint, timeout: float) -> Finding:
    try:
        return await _INFO[endpoint.service](channel, endpoint.address, timeout)
    except grpc.aio.AioRpcError as error:
        failure: OutriderError = error_from_rpc(error, endpoint.service)
        fix = "see its log"
        if "credentials" in failure.code:
            fix = KEY_FIX if endpoint.service == "gateway" else "set the token that its door asks for"
        return problem(endpoint.service, f"{endpoint.address}: {failure.message}", fix)


async def _gateway_info(channel: grpc.aio.Channel, address: str, timeout: float) -> Finding:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    answer = await stub.ListModels(gateway_pb2.GatewayServiceListModelsRequest(), timeout=timeout)
    models = ", ".join(f"{model.id} (context {model.context_length})" for model in answer.models)
    return ok("gateway", f"{address}: serves {models}")


async def _verify_info(channel: grpc.aio.Channel, address: str, timeout: float) -> Finding:
    stub = verify_pb2_grpc.VerifyServiceStub(channel)
    info = await stub.GetInfo(verify_pb2.VerifyServiceGetInfoRequest(), timeout=timeout)
    load = await stub.GetLoad(verify_pb2.VerifyServiceGetLoadRequest(), timeout=timeout)
    text = (
        f"{address}: {info.model}, {info.dtype}, context {info.context_length}, tokenizer {info.tokenizer_hash[:12]}, "
        f"{load.num_pages_used} of {load.num_pages} pages used, {count_of(load.num_healthy_drafts, 'healthy draft')}"
    )
    alone = "" if load.num_healthy_drafts else "tokens come at plain speed; its log says why no draft is used"
    return _judge("verify", text, info.version, alone)


async def _draft_info(channel: grpc.aio.Channel, address: str, timeout: float) -> Finding:
    stub = draft_pb2_grpc.DraftServiceStub(channel)
    info = await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=timeout)
    text = (
        f"{address}: {', '.join(info.sources)}, {count_of(info.num_sessions, 'session')}, "
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


def doors_of(options: Mapping[str, ServiceOptions]) -> Iterator[tuple[ServiceFlag, str]]:
    """Yield every address that these services bind, with the option that sets it."""
    flags = {(flag.service, flag.option.name): flag for flag in service_flags()}
    for name, one in options.items():
        for option in ADDRESS_FIELDS:
            if address := getattr(one, option, ""):
                yield flags[name, option], address


def check_doors(
    options: Mapping[str, ServiceOptions], serving: Mapping[str, str], must_run: bool = False
) -> Iterator[Finding]:
    """Check for every door whether it is free or who has taken it. `serving` maps addresses that answered to services.

    If services `must_run`, a door taken by its own service is fine; otherwise a start would fail.
    """
    taken_ports: dict[str, ServiceFlag] = {}
    for door, address in doors_of(options):
        try:
            (check_address if door.option.name == "address" else split_host_port)(address, door.flag)
        except ConfigError as error:
            yield problem("port", error.message, "correct the address")
            continue
        first = taken_ports.setdefault(address, door)
        if first is not door and not address.endswith(":0"):
            yield problem("port", f"{door.flag} {address} is {first.flag}'s too", "give each door its own port")
            continue
        # A service that runs should also have its other doors where an option names them.
        is_other = door.option.name != "address" and not is_default(options[door.service], door.option.name)
        expected = is_other and not address.endswith(":0") and door.service in serving.values()
        yield _check_free(door, address, serving, must_run, expected)


def _check_free(door: ServiceFlag, address: str, serving: Mapping[str, str], must_run: bool, expected: bool) -> Finding:
    label = f"{door.flag} {address}"
    path = unix_path(address)
    reason, holder, pid = "", serving.get(address, ""), None
    if path is None:
        try:
            reason = bind_error(*split_host_port(address, door.flag))
        except OSError as error:
            return problem("port", f"{label}: {reason_of(error)}", "correct the host")
        if reason:
            pid = listener_of(address)
            holder = holder or _service_of(pid)
    elif not holder:
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            return problem("port", f"{label}: {path.parent} cannot be written", "choose another folder")
        if path.exists():
            return note("port", f"{label}: the file is there, of a service that does not answer or was killed")
    if holder == door.service:
        text = f"{label}: taken by a running {holder}" + (f", process {pid}" if pid else "")
        if must_run:
            return ok("port", text)
        fix = "to start a second one: outrider up --ephemeral; to check the running one: outrider doctor --running"
        return warning("port", text, fix)
    if not reason and not holder:
        if must_run and expected:
            return problem("port", f"{label}: nobody listens there", f"name the address that {door.service} has")
        return ok("port", f"{label}: {'takes a free port' if address.endswith(':0') else 'free'}")
    if not holder and must_run and reason == os.strerror(errno.EADDRNOTAVAIL):
        return note("port", f"{label}: not an address of this machine, and not looked at")
    if not holder and reason != os.strerror(errno.EADDRINUSE):
        return problem("port", f"{label}: {reason}", bind_fix(reason))
    text = f"{label}: {reason or 'taken'}; {_name_of(pid, holder)}"
    return problem("port", text, "end it, or choose another port (0 takes a free one)")


def listener_of(address: str) -> int | None:
    """Return the pid of the process that has taken host:port: 0 for nobody, None if the system does not tell.

    Raises OSError for a host that is not found.
    """
    host, port = split_host_port(address, "address")
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    hosts = {str(target[0]) for *_, target in found}
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    listening = [
        (one.laddr.ip.removeprefix("::ffff:"), one.pid)
        for one in connections
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
    ]
    # One that listens on all interfaces has each of their addresses, and any of those keeps others off all interfaces.
    for has in (operator.eq, _includes, lambda there, wanted: _includes(wanted, there)):
        for there, pid in listening:
            if any(has(there, one) for one in hosts):
                return pid
    return 0


def _includes(every: str, host: str) -> bool:
    """Whether `every` is all interfaces, with those of IPv4 among those of IPv6, and not just `host`."""
    return every == "::" or (every == "0.0.0.0" and ":" not in host)


def _service_of(pid: int | None) -> str:
    """Return the service of Outrider that a process is; empty if it is none."""
    try:
        words = psutil.Process(pid).cmdline() if pid else []
    except psutil.Error:
        return ""
    return next((name for name, module in MODULES.items() if module in words), "")


def _name_of(pid: int | None, service: str) -> str:
    if service:
        return f"{service} of Outrider has it" + (f", process {pid}" if pid else "")
    if pid is None:
        return "the system does not say which process has it: perhaps another user's"
    if pid == 0:
        return "nobody listens there"
    try:
        return f"process {pid} ({psutil.Process(pid).name()}) has it"
    except psutil.Error:
        return f"process {pid} has it"


def check_exposure(options: Mapping[str, ServiceOptions]) -> Iterator[Finding]:
    """Find doors that others can reach without a key or without TLS, and key files that others can read."""
    quiet = True
    for door, address in doors_of(options):
        if is_local(address):
            continue
        quiet = False
        yield from _check_open(door, address, options[door.service])
    for name, one in options.items():
        secrets = ("_token_file", "api_key_file", "tls_key")
        for path in (expand(value) for option, value in vars(one).items() if option.endswith(secrets) and value):
            if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
                quiet = False
                yield warning("exposure", f"{name}: {path} can be read by other users", f"chmod 600 {path}")
    if quiet:
        yield ok("exposure", "every address is reached from this machine alone (loopback or a unix socket)")


def _check_open(door: ServiceFlag, address: str, options: ServiceOptions) -> Iterator[Finding]:
    text = f"{door.flag} {address} can be reached from other machines"
    if door.option.name == "metrics_address":
        yield warning("exposure", f"{text}, without key or TLS", "bind it to loopback or to a network of scrapers")
        return
    lacking, names = [], flag_names()
    secret = "api_key" if isinstance(options, GatewayOptions) else "auth_token"
    if not getattr(options, secret) and not getattr(options, f"{secret}_file"):
        lacking.append(("without a key", names[door.service, f"{secret}_file"]))
    if not options.tls_cert:
        lacking.append(("without TLS", f"{names[door.service, 'tls_cert']} and {names[door.service, 'tls_key']}"))
    if lacking:
        words, flags = (" and ".join(part) for part in zip(*lacking, strict=True))
        yield warning("exposure", f"{text} {words}", f"set {flags} (docs/operations.md), or bind to 127.0.0.1")
    else:
        yield ok("exposure", f"{text}, with key and TLS")
