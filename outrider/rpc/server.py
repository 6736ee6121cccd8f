"""The gRPC server that every service runs, with health, and its arguments from a service's options."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypedDict

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.config.service import ServiceOptions, door_tls, peer_tls
from outrider.errors import ConfigError, OutriderError, reason_of
from outrider.logs import get_logger
from outrider.rpc.credentials import NO_TOKENS, TokenSource
from outrider.rpc.interceptors import BoundaryInterceptor
from outrider.rpc.tls import TlsSource, server_credentials
from outrider.rpc.transport import (
    DEFAULT_HANDSHAKE_SECONDS,
    DEFAULT_MAX_MESSAGE_BYTES,
    check_address,
    grpc_target,
    is_local,
    server_options,
    split_host_port,
    unix_path,
)

_logger = get_logger(__name__)

_Status = health_pb2.HealthCheckResponse

DEFAULT_MESSAGE_SECONDS = 30.0


class DoorOptions(TypedDict):
    """Arguments of GrpcServer that every service takes from its options."""

    address: str
    auth_tokens: TokenSource
    tls: TlsSource | None
    reflection: bool
    max_connection_age: float
    key_fix: str


def door_options(options: ServiceOptions, auth_tokens: TokenSource) -> DoorOptions:
    """Return the arguments; `auth_tokens` open the door. Raises ConfigError, naming a TLS file that cannot be used."""
    files = door_tls(options)
    return DoorOptions(
        address=options.address,
        auth_tokens=auth_tokens,
        tls=TlsSource(files) if files is not None else None,
        reflection=options.reflection,
        max_connection_age=options.max_connection_age_seconds,
        key_fix=options.key_fix,
    )


def peer_source(options: ServiceOptions, peer: str) -> TlsSource | None:
    """Return the TLS of channels to `peer` ("verify", "draft"); None if they have no TLS. Raises ConfigError."""
    files = peer_tls(options, peer)
    return TlsSource(files) if files is not None else None


class GrpcServer:
    """One listening address with health, the boundary interceptor and, if asked for, reflection.

    Create it in the event loop; add servicers to `grpc`, then `start`, warm up, `set_serving(True)`, finally `stop`.

    `address` is "host:port" (port 0 takes a free one) or "unix:/path". `service_names` are the full names that health
    answers for. `max_message_bytes` bounds a message either way. With `auth_tokens` every
    method but health needs one of these bearer tokens. With `tls` clients must speak TLS, and show a certificate if it
    has a `ca`. Methods in `allow_unknown_fields` ("/outrider.v1.DraftService/Speculate") accept messages of newer
    peers; elsewhere an unknown field is refused. With `for_peers`, callers are Outrider services and may say on whose
    behalf they call. A connection older than `max_connection_age` seconds takes no new calls; 0 for any age. Above
    `max_connections` new connections are closed; 0 for any number. A connection whose handshake takes longer than
    `handshake_seconds` is closed. A call whose one message has not arrived after `message_seconds` is refused.
    `on_refused` is called for calls refused before a servicer sees them. `key_fix` is the advice in the warning of a
    door that is open to everybody who can reach its address.
    """

    def __init__(
        self,
        *,
        address: str,
        service_names: Sequence[str],
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        auth_tokens: TokenSource = NO_TOKENS,
        tls: TlsSource | None = None,
        allow_unknown_fields: Collection[str] = (),
        reflection: bool = False,
        for_peers: bool = False,
        max_connection_age: float = 0.0,
        max_connections: int = 0,
        handshake_seconds: float = DEFAULT_HANDSHAKE_SECONDS,
        message_seconds: float = DEFAULT_MESSAGE_SECONDS,
        key_fix: str = ServiceOptions.key_fix,
        on_refused: Callable[[OutriderError], None] | None = None,
    ) -> None:
        check_address(address, "--address")
        self.address = address
        self._tls = tls
        self._key_fix = key_fix
        self._guarded = bool(auth_tokens) or (tls is not None and bool(tls.files.ca))
        self._health = HealthServicer(service_names)
        boundary = BoundaryInterceptor(
            auth_tokens=auth_tokens,
            allow_unknown_fields=allow_unknown_fields,
            for_peers=for_peers,
            message_seconds=message_seconds,
            max_message_bytes=max_message_bytes,
            on_refused=on_refused,
        )
        self.grpc: grpc.aio.Server = grpc.aio.server(
            interceptors=[boundary],
            options=server_options(max_message_bytes, max_connection_age, max_connections, handshake_seconds),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if reflection:
            from grpc_reflection.v1alpha import reflection as service

            service.enable_server_reflection([*service_names, "grpc.health.v1.Health", service.SERVICE_NAME], self.grpc)

    async def start(self) -> str:
        """Bind and accept calls; health says NOT_SERVING. Return the address that was bound.

        Raises ConfigError if the address cannot be bound.
        """
        check_free(self.address)
        path = unix_path(self.address)
        if path is not None:  # `check_free` lets only the socket of a dead process pass
            path.unlink(missing_ok=True)
        try:
            if self._tls is None:
                port = self.grpc.add_insecure_port(grpc_target(self.address))
            else:
                port = self.grpc.add_secure_port(grpc_target(self.address), server_credentials(self._tls))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"--address: cannot bind {self.address}; check that this process has permission, or use another address"
            )
        await self.grpc.start()
        if path is None:
            host, _ = split_host_port(self.address, "--address")
            self.address = f"{host}:{port}"
        _logger.info("bound to %s%s", self.address, " with TLS" if self._tls is not None else "")
        if not self._guarded and not is_local(self.address):
            _logger.warning("anyone who can reach %s can use it; %s", self.address, self._key_fix)
        return self.address

    def set_serving(self, serving: bool) -> None:
        """Set the health to SERVING or NOT_SERVING."""
        self._health.set_serving(serving)
        _logger.info("serving on %s" if serving else "not serving on %s", self.address)

    async def stop(self, grace: float) -> None:
        """Say NOT_SERVING, take no new calls, give running calls `grace` seconds to finish, then cancel them."""
        self._health.close()
        await self.grpc.stop(grace)


class HealthServicer:
    """Health of the server as a whole ("") and of each named service, which all share one status.

    Replaces the library's servicer, which starts as SERVING, stops notifying a service's other watchers when one
    leaves, and keeps watchers open while the server drains, so that each drain would last its whole grace.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = frozenset(("", *service_names))
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Set the status to SERVING or NOT_SERVING; without effect after `close`."""
        self._serving = serving and not self._closed
        self._wake()

    def close(self) -> None:
        """Set the status to NOT_SERVING for good and end every Watch."""
        self._closed = True
        self._serving = False
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._serving else _Status.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        """Answer with the current status; NOT_FOUND for a service that is not here."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:80]!r} here")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Stream the current status and each later one."""
        last = None
        while True:
            # Read before the status, so that a change while the status is being sent is not missed.
            changed, closed = self._changed, self._closed
            status = self._status(request.service)
            if status != last:
                last = status
                yield _Status(status=status)
            if closed:
                return
            await changed.wait()


def _check_socket(path: Path, option: str) -> None:
    """Raise ConfigError unless `path` is free, or the socket of a dead process.

    gRPC would unlink whatever is there, even a live server's socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"{option}: the folder {path.parent} does not exist; create it first") from None
        return
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}; use a path that can be reached") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{option}: {path} exists and is not a socket; use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise ConfigError(f"{option}: {path}: {error.strerror or error}; use another path") from error
    raise ConfigError(f"{option}: {path} is in use by a running process; stop it or use another path")


def check_free(address: str, option: str = "--address") -> None:
    """Raise ConfigError, naming `option`, if an address cannot be bound: gRPC prints to stderr and gives no reason."""
    check_address(address, option)
    path = unix_path(address)
    if path is not None:
        _check_socket(path, option)
        return
    host, port = split_host_port(address, option)
    try:
        reason = bind_error(host, port)
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot resolve the host {host}: {reason_of(error)}; use an address of this machine"
        ) from error
    if reason:
        raise ConfigError(f"{option}: cannot bind port {port} of {host}: {reason}; {bind_fix(reason)}")


def bind_fix(reason: str) -> str:
    """Return what to do about a reason that `bind_error` has returned."""
    fixes = {errno.EACCES: "use a port from 1024 on", errno.EADDRNOTAVAIL: "use an address of this machine"}
    other = "free it or choose another one (0 takes a free one)"
    return next((fix for number, fix in fixes.items() if reason == os.strerror(number)), other)


def bind_error(host: str, port: int) -> str:
    """Return why no server can listen there; empty if one can. Raises OSError for a host that is not found."""
    reason, bindable = "", False
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
                probe.listen()
            bindable = True
        except OSError as error:
            reason = error.strerror or str(error)
            # "localhost" has two addresses: it is fine if this machine lacks one, but not if one is taken.
            if error.errno == errno.EADDRINUSE:
                return reason
    return "" if bindable else reason
