"""TLS from files that may be replaced while a service runs: new connections use the new files."""

from __future__ import annotations

import re
import ssl
import stat
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from outrider.config.service import TlsFiles
from outrider.errors import ConfigError
from outrider.logs import get_logger
from outrider.rpc.credentials import FileSource, local_path, unreadable

_logger = get_logger(__name__)

_MAX_FILE_BYTES = 1 << 20
_MODE_OF_OTHERS = 0o077

_FIRST_CERTIFICATE = re.compile(rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END")
_KEY_KINDS = tuple(
    bytes.fromhex(text)
    for text in (
        "300d06092a864886f70d0101010500",  # RSA
        "301306072a8648ce3d020106082a8648ce3d030107",  # P-256
        "301006072a8648ce3d020106052b81040022",  # P-384
    )
)
"""DER algorithm identifiers, as in certificates, of the kinds of key that gRPC takes. OpenSSL takes more, such as
Ed25519: with these REST would work, but no gRPC call."""

_NAME_MISMATCHES = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_INVALID_TIMES = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


@dataclass(frozen=True)
class TlsMaterial:
    """Content of TLS files, read at one time and checked to fit together."""

    cert: bytes
    key: bytes
    ca: bytes
    context: ssl.SSLContext
    """For an HTTP server."""


class TlsSource(FileSource[TlsMaterial]):
    """The current content of TLS files.

    Replace files by renaming, as Kubernetes and certbot do, or write the key first: a certificate and key that do not
    fit together are not used.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises ConfigError that names option, file and fix."""
        self.files = files
        paths = {files.flag(word): text for word in ("cert", "key", "ca") if (text := getattr(files, word))}
        super().__init__(files.prefix, paths, partial(load_material, files))

    def _taken(self) -> None:
        _warn_of_files(self.files)


def server_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """Return credentials of a gRPC server; with `ca` among the files each client needs a certificate."""
    known_version, material = source.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known_version
        version, material = source.current()
        if version == known_version:
            return None
        known_version = version
        return _configuration(material)

    # The published types do not know that a fetcher may return None for "no change".
    renew: Any = fetch
    return grpc.dynamic_ssl_server_credentials(_configuration(material), renew, bool(source.files.ca))


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca or None)


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Return credentials of a channel, which keeps them for its life."""
    return grpc.ssl_channel_credentials(material.ca, material.key or None, material.cert or None)


def http_context(source: TlsSource) -> ssl.SSLContext:
    """Return a context for an HTTP server; each new connection uses the files as they are then."""
    context = source.current()[1].context

    # OpenSSL calls this at the start of each handshake, even if the client names no server.
    def renew(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        present = source.current()[1].context
        if present is not first:
            connection.context = present

    context.sni_callback = renew
    return context


class _ClientContext(ssl.SSLContext):
    """A client context that checks a server's certificate against `name`, if set, instead of the server's address."""

    name = ""

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        if self.name:
            named["server_hostname"] = self.name
        return super().wrap_socket(*arguments, **named)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return super().wrap_bio(incoming, outgoing, server_side, self.name or server_hostname, session)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for an HTTP client; needs `files.ca`. Raises ConfigError that names option, file and fix."""
    load_material(files)
    context = _ClientContext(ssl.PROTOCOL_TLS_CLIENT)
    context.name = files.name
    context.load_verify_locations(local_path(files.ca))
    if files.cert:
        context.load_cert_chain(local_path(files.cert), local_path(files.key))
    return context


@dataclass(frozen=True)
class CertificateRefusal:
    """Why one end of a connection refuses the other's certificate."""

    by_caller: bool
    """Whether the client refuses the server's certificate; otherwise the server refuses the client's."""
    is_name: bool
    """Whether the certificate is valid, but issued for another name."""
    is_time: bool
    """Whether the certificate has expired or is not valid yet."""
    reason: str


def find_refusal(door: TlsFiles, caller: TlsFiles, name: str) -> CertificateRefusal | None:
    """Try a handshake between a server and its caller in memory; return who refuses and why, None if both agree.

    `name`: the server's name to the caller, unless the caller's files have another.

    Raises ConfigError as `load_material` does.
    """
    client = client_context(caller)
    refused = _try_handshake(load_material(door).context, client, name)
    if refused is None:
        return None
    by_caller, error = refused
    text = getattr(error, "verify_message", None) or error.reason or "no handshake"
    code = getattr(error, "verify_code", 0)
    return CertificateRefusal(by_caller, code in _NAME_MISMATCHES, code in _INVALID_TIMES, text.rstrip("."))


def _try_handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> tuple[bool, ssl.SSLError] | None:
    """Do a handshake in memory; return None on success, else whether the client refused, and its error."""
    for context in (server, client):
        # As in gRPC, intermediate certificates can be trusted directly.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return end is ends[0], error
    return None


def load_material(files: TlsFiles) -> TlsMaterial:
    """Read the files. Raises ConfigError unless they can be read and fit together."""
    content = {word: _read(files, word) for word in ("cert", "key", "ca")}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # Without tickets, since a resumed session would bypass the current certificates.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    if files.cert:
        _attempt(
            f"{files.flag('cert')} and {files.flag('key')}: {files.cert} and {files.key} are not a certificate "
            "and its unencrypted private key, both as PEM",
            lambda: context.load_cert_chain(local_path(files.cert), local_path(files.key), _no_password),
        )
        first = _FIRST_CERTIFICATE.search(content["cert"])
        if first is None or not any(kind in b64decode(first[1]) for kind in _KEY_KINDS):
            raise ConfigError(
                f"{files.flag('key')}: {files.key} is a key of a kind that gRPC does not take; "
                "make one of RSA, P-256 or P-384 and a certificate for it"
            )
    if files.ca:
        _attempt(
            f"{files.flag('ca')}: {files.ca} holds no certificates as PEM",
            lambda: context.load_verify_locations(cadata=content["ca"].decode("ascii", "ignore")),
        )
        context.verify_mode = ssl.CERT_REQUIRED
    return TlsMaterial(**content, context=context)


def _attempt(problem: str, action: Callable[[], None]) -> None:
    try:
        action()
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise ConfigError(f"{problem} ({reason}); see docs/operations.md for commands that make them") from None


def _no_password() -> bytes:
    # Without this callback OpenSSL would ask for a password on the terminal.
    raise ValueError("the key is encrypted")


def _read(files: TlsFiles, word: str) -> bytes:
    text = getattr(files, word)
    if not text:
        return b""
    try:
        with local_path(text).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise unreadable(files.flag(word), text, error) from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{files.flag(word)}: {text} is larger than {_MAX_FILE_BYTES} bytes; name a PEM file")
    return data


def _warn_of_files(files: TlsFiles) -> None:
    """Warn if others than its owner can use the private key, or if the certificate is not valid today."""
    with suppress(ConfigError, OSError):  # replaced in the meantime: the next reload reports it
        if files.cert:
            _warn_of_dates(files)
    mode = 0
    if files.key:
        with suppress(OSError):
            mode = stat.S_IMODE(local_path(files.key).stat().st_mode)
    if mode & _MODE_OF_OTHERS:
        _logger.warning(
            "%s: %s can be read or written by others (mode %03o); run chmod 600 on it",
            files.flag("key"),
            files.key,
            mode,
        )


def _warn_of_dates(files: TlsFiles) -> None:
    """Warn if the certificate is not valid today; OpenSSL does not check dates of certificates only for clients."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(local_path(files.cert))
    refused = _try_handshake(load_material(files).context, client, "localhost")
    if refused is not None and getattr(refused[1], "verify_code", 0) in _INVALID_TIMES:
        reason = getattr(refused[1], "verify_message", "is not valid today")
        _logger.warning("%s: %s: %s, so it will be refused; use another", files.flag("cert"), files.cert, reason)
