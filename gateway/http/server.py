"""The HTTP server under the REST door: uvicorn, with a timeout on every wait for a client, and connection limits."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from ipaddress import IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.http.responses import IN_EVENTS, KEEP_ALIVE, HttpError, error_response
from outrider.config.gateway import GatewayOptions
from outrider.errors import ConfigError, OutriderError
from outrider.logs import ThrottledWarnings, get_logger
from outrider.rpc.tls import TlsSource, http_context
from outrider.rpc.transport import split_host_port

_logger = get_logger(__name__)

_BACKLOG = 2048
_IDLE_SECONDS = 75
"""Time until an idle connection is closed. Longer than proxies and client libraries keep one (5 to 60 s): otherwise
they may send a request while this side closes, and they do not resend one that is not a GET."""
_MAX_HEAD_BYTES = 65536
"""Limit of a request's line and headers while they are incomplete."""
_MAX_HEAD_LINES = 256
"""Most lines of a request's head: parsing a line takes over a microsecond, before any key is checked."""
_ACCEPT_PAUSE_SECONDS = 0.1
"""Pause after a TLS connection could not be accepted, for instance because no more files can be opened."""
_LOOK_SECONDS = 0.1
"""Time between two checks whether a client that has stopped sending is still there."""
_REPEAT_LOG_SECONDS = 30.0
_GRACE_SECONDS = 1.0
"""How long running requests have to end when a server stops."""
_END_POLL_SECONDS = 0.01
"""Time between two checks whether running requests have ended."""
_IPV6_PREFIX_BITS = 64
"""Bits of an IPv6 address that tell clients apart: whoever has one address has all with the same prefix."""


class Connections:
    """The connections of one listening address, and their limits. Used from one event loop."""

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.num_open = 0
        self.on_refused: Callable[[OutriderError], None] = lambda error: None
        """Called with the error of each connection that is refused."""
        self.refusals = ThrottledWarnings(_logger, _REPEAT_LOG_SECONDS)
        """Throttled warnings about data that is not HTTP: anybody can send that, and must not fill the log."""
        self._full = ThrottledWarnings(_logger, _REPEAT_LOG_SECONDS)
        self.max_open = options.max_connections
        self.max_per_client = options.max_connections_per_address or max(1, options.max_connections // 2)
        self._proxies = [ip_network(proxy) for proxy in options.proxies]
        """Networks whose addresses are shared by many clients, and may have all connections."""
        self._idle: dict[_HttpConnection, None] = {}
        """Connections without a request, the one that has been idle longest first."""
        self._per_client: Counter[str] = Counter()

    def admit(self, connection: _HttpConnection) -> bool:
        """Count a new connection; if there are too many, drop an idle one. Return whether the new one may stay.

        If one client has too many, only one of its own gives way.
        """
        self.num_open += 1
        client = connection.client_key
        self._per_client[client] += 1
        client_is_full = bool(client) and self.max_per_client < self._per_client[client]
        if not client_is_full and self.num_open <= self.max_open:
            return True
        for idle in self._idle:
            # A connection whose client is still reading an answer is not idle.
            if not idle.transport.get_write_buffer_size() and (not client_is_full or idle.client_key == client):
                idle.drop()
                return True
        if client_is_full:
            self._full.warn(
                "%d connections from one address, all in use: its new ones are refused "
                "(--max-connections-per-address, --proxies)",
                self.max_per_client,
            )
        else:
            self._full.warn("%d connections, all in use: new ones are refused (--max-connections)", self.max_open)
        return False

    def client_of(self, host: str) -> str:
        """Return the address or IPv6 prefix by which a client's connections are counted; empty if they are not."""
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return ""
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        if any(address in network for network in self._proxies):
            return ""
        if isinstance(address, IPv6Address):
            return str(IPv6Network((address, _IPV6_PREFIX_BITS), strict=False))
        return str(address)

    def set_idle(self, connection: _HttpConnection, idle: bool) -> None:
        """Mark whether a connection has no request. One that was idle before keeps its place in line."""
        if not idle:
            self._idle.pop(connection, None)
        elif connection not in self._idle:
            self._idle[connection] = None

    def remove(self, connection: _HttpConnection) -> None:
        """Remove a connection that has ended from the counts."""
        self.num_open -= 1
        self._per_client[connection.client_key] -= 1
        if not self._per_client[connection.client_key]:
            del self._per_client[connection.client_key]
        self._idle.pop(connection, None)


class _HttpConnection(H11Protocol):
    """A connection is in one of these states, each of which ends after a limited time.

    idle            between requests, or before the first: uvicorn's keep-alive, or until another one needs the place
    in a request    from its whole head to its whole answer: bounded by the application
    late            part of a head has come, or part of a body that is no longer read: `header_seconds`
    unread          the client does not read an answer that waits for it: `stall_seconds` without progress

    During a request the client may close its sending side, as `nc -N` does, and still gets its answer. A client that
    has gone looks the same, but what is sent to it comes back as a reset, and then the request ends.
    """

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        """`arguments` are uvicorn's."""
        super().__init__(**arguments)
        self._connections = connections
        self.client_key = ""
        """Key by which the client's connections are counted; see `Connections.client_of`."""
        self._late_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread = math.inf
        """Bytes that the client had not read when the timer was set."""
        self._look_timer: asyncio.TimerHandle | None = None
        """Set while the client has closed its sending side and is still answered."""
        self._probe_time = 0.0
        """When to send something next, to see whether such a client is still there."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_key = self._connections.client_of(self.client[0] if self.client else "")
        if not self._connections.admit(self):
            problem = "too many connections; try again later"
            error = HttpError(503, problem, "too_many_connections", {"retry-after": "1"})
            self._connections.on_refused(error)
            self._refuse(error)
            return
        # Without this, the base class would wait for the first byte forever.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self._update_state()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._update_state()

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE and _num_head_lines(self.conn.trailing_data[0]) > _MAX_HEAD_LINES:
            text = f"the request has more than {_MAX_HEAD_LINES} lines of headers; send fewer"
            self._refuse_head(HttpError(431, text, "head_too_large"))
        else:
            super().handle_events()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._look_timer is not None and not self._has_whole_request:
            self.transport.close()
        self._update_state()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if a whole request waits for its answer; TLS transports cannot stay half open."""
        if self.scheme == "https" or not self._has_whole_request:
            return False
        if self._look_timer is None:
            self._look_timer = self.loop.call_later(_LOOK_SECONDS, self._look)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        for timer in (self._late_timer, self._unread_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = math.inf  # the client has read some, however much is written now

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._update_state()

    def drop(self) -> None:
        """End an idle connection at once."""
        self._connections.set_idle(self, False)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP, in the shape of all other errors."""
        cause = sys.exc_info()[1]
        if isinstance(cause, h11.RemoteProtocolError) and cause.error_status_hint == 431:
            text = f"the request's line and headers have more than {_MAX_HEAD_BYTES} bytes; send fewer"
            error = HttpError(431, text, "head_too_large")
        else:
            error = HttpError(400, "this is no valid HTTP request", "invalid_http")
        self._refuse_head(error)

    def _refuse_head(self, error: OutriderError) -> None:
        """Count and answer a request that the application does not see."""
        self._connections.refusals.warn("refused: %s: %s", error.code, error.message)
        if not self._in_request:  # a running request counts its end itself
            self._connections.on_refused(error)
        self._refuse(error)

    def _refuse(self, error: OutriderError) -> None:
        """Answer with an error that does not come from the application, and close the connection."""
        answer = error_response(error)
        answer.headers["connection"] = "close"
        status = HTTPStatus(answer.status_code)
        response = h11.Response(status_code=status, headers=answer.raw_headers, reason=status.phrase)
        events = (response, h11.Data(bytes(answer.body)), h11.EndOfMessage())
        try:
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        except h11.LocalProtocolError:  # in the middle of another answer
            self.transport.abort()
            return
        self.transport.close()
        self._update_state()

    @property
    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_whole_request(self) -> bool:
        """Whether the client has sent a whole request, to which an answer is due."""
        return self._in_request and self.conn.their_state is not h11.SEND_BODY

    def _look(self) -> None:
        """End the connection if its client, which has stopped sending, has gone."""
        if self.transport.is_closing():  # the socket may be closed, or its number belong to another connection
            return
        self._look_timer = self.loop.call_later(_LOOK_SECONDS, self._look)
        now = self.loop.time()
        error = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.transport.abort()
        elif self._in_request and now >= self._probe_time and not self.transport.get_write_buffer_size():
            self._probe_time = now + self._connections.options.keep_alive_seconds
            self._probe()

    def _probe(self) -> None:
        """Send something that a client that is there ignores."""
        if not self.cycle.response_started:
            if self.conn.their_http_version != b"1.1":  # HTTP/1.0 has no informational responses
                self.transport.abort()
                return
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")) or b""
            )
        elif self.cycle.scope["state"].get(IN_EVENTS):
            self.transport.write(self.conn.send(h11.Data(KEEP_ALIVE)) or b"")

    def _update_state(self) -> None:
        """Set the timers that belong to the present state."""
        in_request = self._in_request
        closing = self.transport.is_closing()
        pending = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        late = pending and not in_request and not closing
        if self._late_timer is not None and not late:
            self._late_timer.cancel()
            self._late_timer = None
        elif late and self._late_timer is None:
            self._late_timer = self.loop.call_later(self._connections.options.header_seconds, self.transport.abort)
        self._connections.set_idle(self, not (in_request or late or closing))
        if self._unread_timer is None:
            self._watch_unread()

    def _watch_unread(self) -> None:
        """End the connection if its client has read nothing since the last check."""
        self._unread_timer = None
        left = self.transport.get_write_buffer_size()
        in_request = self._in_request and not self.transport.is_closing()
        if in_request and not self.flow.write_paused:  # the application may have written more than was read
            self._unread = math.inf
        elif left >= self._unread:
            self.transport.abort()
            return
        else:
            self._unread = left or math.inf
        if left or in_request:
            self._unread_timer = self.loop.call_later(self._connections.options.stall_seconds, self._watch_unread)


def _num_head_lines(data: bytes) -> int:
    """Count the lines up to the first empty one, which ends the head of a request."""
    ends = [end for end in (data.find(b"\n\r\n"), data.find(b"\n\n")) if end >= 0]
    return data.count(b"\n", 0, min(ends, default=len(data)))


# Giving up an answer is no fault, for instance if the client does not read it.
logging.getLogger("uvicorn.error").addFilter(
    lambda record: record.msg != "ASGI callable returned without completing response."
)


class _TlsListener:
    """Accepts connections, and does the TLS handshake with each client. Used from one event loop.

    Handshakes under way have the same limits, in all and for one client, as connections. asyncio would not count them,
    and clients that never speak could use up all files that the process may open.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        connect: Callable[[], asyncio.Protocol],
        connections: Connections,
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
            with suppress(OSError):  # no TLS, no accepted certificate, too late, or the client is gone
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


class HttpServer:
    """One listening address: uvicorn's protocol with our connections."""

    def __init__(
        self, app: ASGIApp, address: str, *, option: str, options: GatewayOptions, tls: TlsSource | None = None
    ) -> None:
        """Bind at once, so that a wrong address fails early; `option` names it in errors. Raises ConfigError.

        `options` hold the limits of connections.
        """
        host, port = split_host_port(address, option)
        self._socket = bind(host.strip("[]"), port, address, option)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self.config = uvicorn.Config(
            _origin_form(app),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_IDLE_SECONDS,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        )
        self.config.load()
        self._tls = None if tls is None else http_context(tls)
        self._state = ServerState()
        self.connections = Connections(options)
        self._server: asyncio.Server | _TlsListener | None = None
        self._dates: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to accept connections."""
        connect = partial(_HttpConnection, self.connections, config=self.config, server_state=self._state, app_state={})
        self._dates = asyncio.create_task(self._renew_date(), name=f"date of {self.address}")
        if self._tls is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(connect, sock=self._socket, backlog=_BACKLOG)
        else:
            self._server = _TlsListener(self._socket, self._tls, connect, self.connections)

    async def _renew_date(self) -> None:
        """Keep the Date header of answers up to date."""
        while True:
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """Accept no more connections; running requests get a second, then they are cancelled."""
        if self._server is None or self._dates is None:
            self._socket.close()
            return
        self._server.close()
        state = self._state
        for connection in tuple(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                while state.connections or state.tasks:
                    await asyncio.sleep(_END_POLL_SECONDS)
                await self._server.wait_closed()
        except TimeoutError:
            if state.tasks:  # otherwise only clients are left that do not take the end of their connections
                _logger.error("%d requests did not end in time and are cancelled", len(state.tasks))
            for task in state.tasks:
                task.cancel()
        self._dates.cancel()


_ABSOLUTE_FORM = re.compile(rb"https?://(?:[^/@]*@)?([^/@]+)(/.*)?", re.IGNORECASE)


def _origin_form(app: ASGIApp) -> ASGIApp:
    """Wrap `app` to also serve requests whose target is a whole URL, as proxies send them (RFC 9112, 3.2.2).

    The host of the URL then replaces the Host header.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if absolute := _ABSOLUTE_FORM.fullmatch(scope["raw_path"]):
            host, raw_path = absolute[1], absolute[2] or b"/"
            headers = [(b"host", host), *(header for header in scope["headers"] if header[0] != b"host")]
            scope.update(raw_path=raw_path, path=unquote(raw_path.decode("ascii")), headers=headers)
        await app(scope, receive, send)

    return served


def bind(host: str, port: int, address: str, option: str) -> socket.socket:
    """Return a listening socket; `address` and `option` name it in errors. Raises ConfigError."""
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
