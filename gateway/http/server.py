"""The HTTP server under the REST door."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from ipaddress import ip_network
from typing import Any

import uvicorn

from gateway.http.connection import Connections, HttpConnection
from outrider.errors import ConfigError
from outrider.rpc.tls import TlsSource, http_context
from outrider.rpc.transport import split_host_port

_BACKLOG = 2048
_IDLE_SECONDS = 75
"""Until an idle connection is closed. Longer than proxies and client libraries keep one (5 to 60 s): they may send a
request while this side closes, and one that is no GET is not sent again."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, the process has its own, and with our connections."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on `sockets`."""
        make = partial(
            HttpConnection, self._connections, config=self.config, server_state=self.server_state, app_state={}
        )
        loop, ssl = asyncio.get_running_loop(), self.config.ssl
        self.lifespan = self.config.lifespan_class(self.config)
        self.servers = [
            await loop.create_server(
                make,
                sock=one,
                ssl=ssl,
                backlog=_BACKLOG,
                ssl_handshake_timeout=None if ssl is None else self._connections.header_seconds,
            )
            for one in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpServer:
    """One listening address. `app` is an ASGI application."""

    def __init__(
        self,
        app: Any,
        address: str,
        *,
        option: str,
        tls: TlsSource | None = None,
        max_connections: int = 1024,
        max_connections_per_address: int = 0,
        proxies: Sequence[str] = (),
        header_seconds: float = 10.0,
        stall_seconds: float = 60.0,
    ) -> None:
        """Binds at once, so that a wrong address fails early. `option` names it in errors. Raises ConfigError.

        `max_connections_per_address`: of one client, 0 for any number; `proxies`, addresses or networks, are many.
        `header_seconds`: for the head of a request; `stall_seconds`: how long a client may take nothing of its answer.
        """
        host, port = split_host_port(address, option)
        self._socket = bind(host.strip("[]"), port, address, option)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            loop="none",
            timeout_keep_alive=_IDLE_SECONDS,
        )
        config.load()  # which would set the context anew
        if tls is not None:
            config.ssl = http_context(tls)
        self.connections = Connections(
            max_connections,
            header_seconds,
            stall_seconds,
            most_per_client=max_connections_per_address,
            proxies=[ip_network(proxy) for proxy in proxies],
        )
        self._server = _Server(config, self.connections)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accepts connections."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"http {self.address}")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task

    async def stop(self, grace: float) -> None:
        """Accepts no more; requests still running get `grace` seconds, then they are cancelled."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        if self._task is None:
            self._socket.close()
        else:
            await self._task


def bind(host: str, port: int, address: str, option: str) -> socket.socket:
    """A listening socket; `address` and `option` name it in errors. Raises ConfigError."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # With the protocol named, asyncio turns Nagle's algorithm off; otherwise each answer would wait 40 ms for an
        # acknowledgement between its head and its body.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"{option}: {address}: {error.strerror or error}; use an address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{option}: cannot bind {address}: {error.strerror or error}; choose another port (0 takes a free one)"
        ) from None
    return listener
