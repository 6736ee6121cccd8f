"""gRPC settings that both ends of a connection must agree on, and the formats of addresses."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, urlsplit

from outrider.errors import ConfigError

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
DEFAULT_HANDSHAKE_SECONDS = 20.0
MAX_STREAMS = 4096
"""Most calls on one connection at once; further calls wait in the client."""

MAX_UNIX_PATH_BYTES = 107
"""The kernel's limit for a socket's path."""

KEEPALIVE_SECONDS = 10
KEEPALIVE_TIMEOUT_SECONDS = 5

ChannelOptions = list[tuple[str, int | str]]


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
