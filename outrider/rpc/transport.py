"""gRPC settings that both ends of a connection must agree on, and the formats of addresses.

A DNS name among the addresses of peers stands for all its addresses; it is looked up again and again for changes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import quote, urlsplit

from outrider.errors import ConfigError, count_of, reason_of
from outrider.logs import get_logger

_logger = get_logger(__name__)

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
DEFAULT_HANDSHAKE_SECONDS = 20.0
MAX_STREAMS = 4096
"""Most calls on one connection at once; further calls wait in the client."""

MAX_UNIX_PATH_BYTES = 107
"""The kernel's limit for a socket's path."""

KEEPALIVE_SECONDS = 10
KEEPALIVE_TIMEOUT_SECONDS = 5

ChannelOptions = list[tuple[str, int | str]]

DNS_SCHEME = "dns:"


def _common_options(max_message_bytes: int) -> ChannelOptions:
    """Return options of both ends: a dead peer is noticed within 15 seconds, idle or busy; messages are bounded."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Timeout of other pings than keepalive: gRPC pings to measure the connection with each message, and sends no
        # keepalive until that ping is answered. The default timeout is a minute.
        ("grpc.http2.ping_timeout_ms", (KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS) * 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        # The limit on what peers may send must not cut off our own answers, which can be longer than the requests.
        ("grpc.max_send_message_length", max(max_message_bytes, DEFAULT_MAX_MESSAGE_BYTES)),
    ]


def server_options(
    max_message_bytes: int,
    max_connection_age: float = 0.0,
    max_connections: int = 0,
    handshake_seconds: float = DEFAULT_HANDSHAKE_SECONDS,
) -> ChannelOptions:
    """Return options of a server. Times are in seconds; 0 means no limit to the age or the number of connections."""
    age = [("grpc.max_connection_age_ms", max(1, round(max_connection_age * 1000)))] if max_connection_age else []
    handshake_ms = max(1, round(handshake_seconds * 1000))
    return [
        *age,
        *([("grpc.max_allowed_incoming_connections", max_connections)] if max_connections else []),
        *_common_options(max_message_bytes),
        # Limits of the TLS handshake and, after it, of HTTP/2's first frames.
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        ("grpc.http2.settings_timeout", handshake_ms),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Half the clients' interval, so that jitter never makes an honest client look like a flood (too_many_pings).
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
        # A second server on the same port must fail, not take every other connection.
        ("grpc.so_reuseport", 0),
    ]


def channel_options(max_message_bytes: int) -> ChannelOptions:
    """Return options of a client."""
    return [
        *_common_options(max_message_bytes),
        # A peer that comes back is found again within two seconds.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # The same for a peer at a new address of its name: by default gRPC waits 30 seconds between look-ups of a name.
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        # Services talk to each other directly, whatever http_proxy says.
        ("grpc.enable_http_proxy", 0),
        # A connection of its own: one channel's large messages do not delay another's.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def unix_path(address: str) -> Path | None:
    """Return the path of a "unix:/path" address, or None for any other."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def grpc_target(address: str) -> str:
    """Return an address in gRPC's form, where a socket's path is part of a URI: `#`, `?` and `%` are escaped."""
    path = address.removeprefix("unix:")
    return address if path == address else f"unix:{quote(os.fsencode(path))}"


def check_address(address: str, option: str) -> None:
    """Raise ConfigError, naming `option`, unless `address` is "host:port" or "unix:/path"."""
    path = unix_path(address)
    if path is None:
        split_host_port(address, option, ", or unix:/path")
        return
    text = address.removeprefix("unix:")
    length = len(os.fsencode(text))
    if not text or text == "//":
        raise ConfigError(f"{option}: {address!r} names no path; use unix:/path/to/socket")
    if length > MAX_UNIX_PATH_BYTES:
        raise ConfigError(
            f"{option}: the path {text} has {length} bytes, the kernel allows {MAX_UNIX_PATH_BYTES}; use a shorter one"
        )


def check_peer_address(address: str, option: str) -> None:
    """Raise ConfigError as `check_address` does, and for port 0, where no peer can listen."""
    check_address(address, option)
    if unix_path(address) is None and split_host_port(address, option)[1] == 0:
        raise ConfigError(f"{option}: {address!r} has port 0, where nothing can listen; use the port of the service")


def is_http_url(text: str) -> bool:
    """Whether `text` is an HTTP or HTTPS URL with a host and without port 0."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address: a unix socket or a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    return unix_path(address) is not None or host in ("localhost", "::1") or host.startswith("127.")


def split_host_port(address: str, option: str, others: str = "") -> tuple[str, int]:
    """Return host and port of "host:port" ("[::1]:port" for IPv6); raise ConfigError, naming `option`, otherwise.

    `others`: other forms that the error says are allowed, too.
    """
    if "://" in address:
        raise ConfigError(f"{option}: {address!r} is a URL; use host:port{others}")
    host, colon, port_text = address.rpartition(":")
    is_port = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and int(port_text) <= 65535
    if not colon or not host or not is_port:
        raise ConfigError(f"{option}: {address!r} is not an address; use host:port with a port from 0 to 65535{others}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"{option}: {address!r} is not an address; put an IPv6 host in brackets, like [::1]:50051")
    try:
        host.encode("idna")  # a lookup does this, too, and would raise the error later
    except UnicodeError as error:
        raise ConfigError(
            f"{option}: {address!r} is not an address: {error.__cause__ or error}; use a host's name or number"
        ) from None
    return host, int(port_text)


class PeerAddresses:
    """The addresses that an option lists, with each "dns:///name:port" (gRPC's notation) replaced by its addresses.

    A gRPC channel to such a name would use only one of the addresses, or spread calls over them in turn. A caller that
    must tell its peers apart needs a channel to each.
    """

    def __init__(self, given: Sequence[str], option: str, *, seconds: float) -> None:
        """Look names up every `seconds`. Raises ConfigError, naming `option`, for a malformed address."""
        self._seconds = seconds
        self.lookup: Callable[[str, int], Awaitable[Collection[str]]] = look_up
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._names: dict[str, tuple[str, int]] = {}
        self._found: dict[str, tuple[str, ...]] = {}
        """Addresses of each entry of the list; for a name those of the last successful look-up."""
        self._problems: dict[str, str] = {}
        for address in given:
            if address.startswith(DNS_SCHEME):
                self._names[address] = split_name(address, option)
                self._found[address] = ()
            else:
                check_peer_address(address, option)
                self._found[address] = (address,)

    def __bool__(self) -> bool:
        """Whether any address or name is given."""
        return bool(self._found)

    @property
    def now(self) -> tuple[str, ...]:
        """The addresses known now, each once; names have none before `follow` has looked them up."""
        return tuple(dict.fromkeys(address for found in self._found.values() for address in found))

    async def follow(self) -> AsyncIterator[tuple[str, ...]]:
        """Yield the addresses, and again whenever they change; end after the first if there are no names.

        A look-up that fails or finds nothing changes nothing: no peer is lost because a DNS server is down, and peers
        that are gone are noticed by their own connections.
        """
        last = self.now
        if last:
            yield last
        while self._names:
            await asyncio.gather(*(self._look(name) for name in self._names))
            if self.now != last:
                last = self.now
                yield last
            await self.sleep(self._seconds)

    async def _look(self, name: str) -> None:
        found: tuple[str, ...] = ()
        try:
            found = tuple(sorted(await self.lookup(*self._names[name])))
            problem = "" if found else "it has no address"
        except (OSError, UnicodeError) as error:
            problem = reason_of(error)
        if problem and problem != self._problems.get(name):
            kept = f"kept: {count_of(len(self._found[name]), 'address', 'addresses')} of before"
            _logger.warning("%s cannot be looked up: %s; %s", name, problem, kept if self._found[name] else "waiting")
        self._problems[name] = problem
        if found and found != self._found[name]:
            self._found[name] = found
            _logger.info("%s is now %s", name, ", ".join(found))


async def look_up(host: str, port: int) -> Collection[str]:
    """Return all addresses of `host` as "host:port". The system's resolver uses /etc/hosts and search domains.

    IPv6 addresses are returned only if there are no IPv4 ones: a replica with both must not count twice. Raises OSError
    or UnicodeError.
    """
    answer: Future[Collection[str]] = Future()
    answer.set_running_or_notify_cancel()  # then setting a result works even after the caller was cancelled

    def ask() -> None:
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)
        else:
            found = {f"{place[0]}:{port}" for family, *_, place in places if family == socket.AF_INET}
            answer.set_result(found or {f"[{place[0]}]:{port}" for *_, place in places})

    # Not in the loop's pool: the process waits for the pool's threads at exit, and a look-up can take long.
    threading.Thread(target=ask, name=f"look up {host}", daemon=True).start()
    return await asyncio.wrap_future(answer)


def split_name(address: str, option: str) -> tuple[str, int]:
    """Return host and port of "dns:///host:port" or "dns:host:port". Raises ConfigError."""
    rest = address.removeprefix(DNS_SCHEME)
    if rest.startswith("//"):
        server, slash, rest = rest.removeprefix("//").partition("/")
        if server or not slash:
            raise ConfigError(
                f"{option}: {address!r} names a DNS server; write dns:///name:port to use those of this machine"
            )
    return split_host_port(rest, option)
