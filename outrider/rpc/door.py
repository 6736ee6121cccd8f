"""What the options of a service say of its gRPC door."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypedDict

from outrider.config.service import ServiceOptions
from outrider.config.tls import door_tls, peer_tls
from outrider.rpc.tls import TlsSource


class DoorOptions(TypedDict):
    """Arguments of GrpcServer that every service takes from its options."""

    address: str
    auth_token: Collection[str] | Mapping[str, str]
    tls: TlsSource | None
    reflection: bool
    max_connection_age: float


def door_options(options: ServiceOptions, auth_tokens: Collection[str] | Mapping[str, str]) -> DoorOptions:
    """The arguments; `auth_tokens` open the door. Raises ConfigError, naming the file of TLS that is of no use."""
    files = door_tls(options)
    return DoorOptions(
        address=options.address,
        auth_token=auth_tokens,
        tls=TlsSource(files) if files is not None else None,
        reflection=options.reflection,
        max_connection_age=options.max_connection_age_seconds,
    )


def peer_source(options: ServiceOptions, peer: str) -> TlsSource | None:
    """The TLS of channels to `peer` ("verify", "draft"); None where they are plain. Raises ConfigError."""
    files = peer_tls(options, peer)
    return TlsSource(files) if files is not None else None
