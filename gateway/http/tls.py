"""TLS connections of the REST door: accepting them, and the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from outrider.config.gateway import GatewayOptions

_ACCEPT_PAUSE_SECONDS = 0.1
"""Pause after a connection could not be accepted, for instance because no more files can be opened."""


class Limits(Protocol):
    """The limits of connections, which `gateway.http.server.Connections` has."""

    max_open: int
    max_per_client: int
    options: GatewayOptions

    def client_of(self, host: str) -> str:
        """Return a key for the client with this address; empty if many clients share the address."""


class TlsListener:
    """Accepts connections, and does the TLS handshake with each client. Used from one event loop.

    Handshakes under way have the same limits, in all and for one client, as connections. asyncio would not count them,
    and clients that never speak could use up all files that the process may open.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        connect: Callable[[], asyncio.Protocol],
        connections: Limits,
    ) -> None:
        """`connect` makes the protocol of a connection with TLS; `connections` has the limits."""
        self._listener = listener
        self._context = context
        self._connect = connect
        self._connections = connections
        self._per_client: Counter[str] = Counter()
        self._handshakes: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError:
                    await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                else:
                    self._begin(connection, self._connections.client_of(address[0]))
        finally:
            self._listener.close()

    def _begin(self, connection: socket.socket, client: str) -> None:
        limits = self._connections
        client_is_full = bool(client) and self._per_client[client] >= limits.max_per_client
        if client_is_full or len(self._handshakes) >= limits.max_open:
            connection.close()
            return
        self._per_client[client] += 1
        task = asyncio.create_task(self._agree(connection, client))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _agree(self, connection: socket.socket, client: str) -> None:
        try:
            with contextlib.suppress(OSError):  # no TLS, no accepted certificate, too late, or the client is gone
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._connect,
                    connection,
                    ssl=self._context,
                    ssl_handshake_timeout=self._connections.options.header_seconds,
                )
        finally:
            self._per_client[client] -= 1
            if not self._per_client[client]:
                del self._per_client[client]

    def close(self) -> None:
        """Accept no more connections, and cancel handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until accepting and all handshakes have ended."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
