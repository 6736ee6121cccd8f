"""`outrider health`: tell by exit code whether a service serves. Container engines call it; see docs/deploy.md."""

from __future__ import annotations

import argparse
import asyncio
import os

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.config.base import expand
from outrider.config.gateway import GatewayOptions
from outrider.config.service import TlsFiles, peer_tls, read_secret
from outrider.rpc.channel import open_channel
from outrider.rpc.status import details_of
from outrider.rpc.tls import TlsSource
from outrider.rpc.transport import check_address, split_host_port, unix_path

SERVES, SERVES_NOT = 0, 1
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_ENV = "OUTRIDER_HEALTH_"
_TLS_WORDS = {
    "ca": "PEM file with the CA certificates that must have signed the service's; turns TLS on.",
    "cert": "PEM file with the certificate to present, if the service asks for one.",
    "key": "PEM file with the private key of this certificate.",
    "name": "Name in the service's certificate, if it is not the host of the address.",
}


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "address",
        nargs="?",
        default=os.environ.get("OUTRIDER_ADDRESS") or GatewayOptions.address,
        help="The service's gRPC door: host:port or unix:/path. Default: $OUTRIDER_ADDRESS, the address of a service "
        f"in this environment, or else the gateway's {GatewayOptions.address}.",
    )
    parser.add_argument(
        "--service",
        default="",
        help="Full name of the gRPC service, like outrider.v1.VerifyService. Default: the process as a whole.",
    )
    parser.add_argument("--timeout", type=_seconds, default=3.0, help="Seconds to wait for an answer. Default: 3.")
    parser.add_argument(
        "--token-file", type=expand, help="File with a bearer token; Outrider's own services need none for this."
    )
    for word, text in _TLS_WORDS.items():
        name = f"{_ENV}TLS_{word.upper()}"
        flags = f"--connect-tls-{word}", f"--tls-{word}"
        parser.add_argument(*flags, default=os.environ.get(name, ""), help=f"{text} Environment: {name}.")


def run(arguments: argparse.Namespace) -> int:
    """Ask once and print the answer; return exit code 0 for SERVING, 1 for another answer or none."""
    address = reachable(arguments.address)
    files = peer_tls(arguments, "connect")
    token = read_secret("", arguments.token_file, "--token")
    answer, detail = asyncio.run(ask(address, arguments.service, arguments.timeout, token, files))
    print(f"{address}: {answer}" + (f" ({detail})" if detail else ""))
    return SERVES if answer == "SERVING" else SERVES_NOT


def reachable(address: str) -> str:
    """Return where to call a service that binds `address`: loopback for every interface. Raises ConfigError."""
    check_address(address, "address")
    if unix_path(address) is not None:
        return address
    host, port = split_host_port(address, "address")
    return f"{_ANY_HOST.get(host, host)}:{port}"


async def ask(address: str, service: str, timeout: float, token: str, tls: TlsFiles | None) -> tuple[str, str]:
    """Return a service's health status, or the gRPC status code that came instead, and details of an error.

    `timeout` is in seconds. Raises ConfigError for unusable TLS files.
    """
    source = TlsSource(tls) if tls is not None else None
    async with open_channel(address, auth_token=token, tls=source) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return error.code().name, " ".join(details_of(error).split())
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)), ""


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return value
