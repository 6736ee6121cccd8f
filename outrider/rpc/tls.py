"""TLS from files that may be replaced while a service runs: new connections use what lies there then."""

from __future__ import annotations

import ssl
import threading
from typing import Any

import grpc

from outrider.config.tls import TlsFiles
from outrider.errors import ConfigError
from outrider.logs import get_logger
from outrider.rpc.tls_files import Material, Stamp, load, stamp_of, warn_of_readable_key

_logger = get_logger(__name__)


class TlsSource:
    """The content of TLS files. Each look at it costs three calls of stat; any thread may look.

    Files that are replaced by some that cannot be used change nothing, and a line in the log says so. Replace them by
    renaming, as Kubernetes and certbot do, or write the key first: what does not fit together is not taken.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Reads them. Raises ConfigError that names option, file and fix."""
        self.files = files
        self._lock = threading.Lock()
        self._stamp = stamp_of(files)
        self._refused: Stamp | None = None
        self._version = 1
        self._material = load(files)
        warn_of_readable_key(files)

    def current(self) -> tuple[int, Material]:
        """A number that rises with each change, and what to use now."""
        with self._lock:
            self._look()
            return self._version, self._material

    def _look(self) -> None:
        try:
            stamp = stamp_of(self.files)
        except ConfigError as error:
            self._refuse((), error)
            return
        if stamp in (self._stamp, self._refused):
            return
        try:
            material = load(self.files)
            settled = stamp_of(self.files) == stamp
        except ConfigError as error:
            self._refuse(stamp, error)
            return
        if settled:  # if not, the next connection finds them written to the end
            self._stamp, self._material, self._refused = stamp, material, None
            self._version += 1
            _logger.info("%s: the files have changed and are used from now on", self.files.prefix)
            warn_of_readable_key(self.files)

    def _refuse(self, stamp: Stamp, error: ConfigError) -> None:
        """Say so, once for each state of the files."""
        if stamp != self._refused:
            _logger.warning("the files have changed and are of no use; the former ones stay in use: %s", error.message)
        self._refused = stamp


def server_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """Credentials of a gRPC server; with `ca` among the files each client needs a certificate."""
    version, material = source.current()
    held = version

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal held
        version, material = source.current()
        if version == held:
            return None
        held = version
        return _configuration(material)

    # The published types do not know that a fetcher may return None, for no change.
    renew: Any = fetch
    return grpc.dynamic_ssl_server_credentials(_configuration(material), renew, bool(source.files.ca))


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Credentials of a channel; a channel keeps what it was made with."""
    return grpc.ssl_channel_credentials(material.ca, material.key or None, material.cert or None)


def http_context(source: TlsSource) -> ssl.SSLContext:
    """A context for an HTTP server, each of whose connections uses the files of its time."""
    _, material = source.current()
    context = material.context

    # OpenSSL asks at the begin of each handshake, also where the client names no server.
    def renew(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        _, material = source.current()
        if material.context is not first:
            connection.context = material.context

    context.sni_callback = renew
    return context


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca or None)
