"""A service's page for Prometheus."""

from __future__ import annotations

from types import TracebackType

from prometheus_client import CollectorRegistry, start_http_server

from outrider.errors import ConfigError
from outrider.rpc.transport import split_host_port


class MetricsPage:
    """Serves /metrics of a registry while entered, from a thread of its own.

    `address` is host:port, where port 0 takes a free one; empty serves nothing. Entering returns the address really
    bound and raises ConfigError when it cannot be.
    """

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        self._address = address
        self._registry = registry

    def __enter__(self) -> str:
        if not self._address:
            return ""
        host, port = split_host_port(self._address, "--metrics-address")
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), self._registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics-address: cannot bind {self._address}: {error.strerror}; use another port, 0 for a free one"
            ) from error
        return f"{host}:{self._server.server_port}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._address:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
