"""One HTTP connection, and how many there may be: uvicorn's protocol with an end to every wait for a client."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.http.errors import HttpError, error_body
from outrider.errors import OutriderError
from outrider.logs import get_logger

_logger = get_logger(__name__)

_REPEAT_LOG_SECONDS = 30.0
_IPV6_PREFIX = 64
"""Bits of an IPv6 address that tell clients apart: who has one address has all that begin so."""


@dataclass
class Connections:
    """The connections of one address of ours. Used from one event loop."""

    most: int
    header_seconds: float
    """That a client gets for the head of a request, and for the rest of a body that nobody reads."""
    stall_seconds: float
    """That it may take nothing of an answer that is complete."""
    most_per_client: int = 0
    """From one address of theirs; 0 for any number."""
    proxies: Sequence[IPv4Network | IPv6Network] = ()
    """Addresses that are many clients', and may have all connections."""
    num_open: int = 0
    num_refused: int = 0
    on_refused: Callable[[OutriderError], None] | None = None
    """Is told of each connection that is refused."""
    _idle: dict[HttpConnection, None] = field(default_factory=dict)
    """Those without a request; the one that has been longest without is first."""
    _per_client: Counter[str] = field(default_factory=Counter)
    _silent_until: float = 0.0

    def let_in(self, connection: HttpConnection) -> bool:
        """Counts a new connection; when there are too many, an idle one gives way. Returns whether it may stay.

        Where one client has too many, it has to be one of its own.
        """
        self.num_open += 1
        client = connection.peer
        self._per_client[client] += 1
        crowded = bool(client) and 0 < self.most_per_client < self._per_client[client]
        if not crowded and self.num_open <= self.most:
            return True
        for idle in self._idle:
            if not crowded or idle.peer == client:
                idle.drop()
                return True
        self.num_refused += 1
        now = connection.loop.time()
        if now >= self._silent_until:
            self._silent_until = now + _REPEAT_LOG_SECONDS
            if crowded:
                text, most = "%d connections from one address, all in use: its new ones", self.most_per_client
                _logger.warning(f"{text} are refused (--max-connections-per-address, --proxies)", most)
            else:
                _logger.warning("%d connections, all in use: new ones are refused (--max-connections)", self.most)
        return False

    def client_of(self, host: str) -> str:
        """By what a client's connections are counted; empty where they are not counted by client."""
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return ""
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        if any(address in network for network in self.proxies):
            return ""
        if isinstance(address, IPv6Address):
            return str(IPv6Network((address, _IPV6_PREFIX), strict=False))
        return str(address)

    def set_idle(self, connection: HttpConnection, idle: bool) -> None:
        """Whether it has no request; keeps its place in the line."""
        if not idle:
            self._idle.pop(connection, None)
        elif connection not in self._idle:
            self._idle[connection] = None

    def gone(self, connection: HttpConnection) -> None:
        """A connection is over."""
        self.num_open -= 1
        self._per_client[connection.peer] -= 1
        if not self._per_client[connection.peer]:
            del self._per_client[connection.peer]
        self._idle.pop(connection, None)


class HttpConnection(H11Protocol):
    """A connection is in one of these states, and none but the second lasts as long as the client likes.

    idle            between requests, or before the first: uvicorn's keep-alive, or until another one needs the place
    in a request    from its whole head to its whole answer: bounded by the application
    late            part of a head is here, or part of a body that nobody reads any more: `header_seconds`
    unread          the answer is complete and the client does not take it: `stall_seconds` without progress
    """

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        """`arguments` are uvicorn's."""
        super().__init__(**arguments)
        self._all = connections
        self.peer = ""
        """As `Connections.client_of` names the client."""
        self._refused = False
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See the base."""
        super().connection_made(transport)
        self.peer = self._all.client_of(self.client[0] if self.client else "")
        self._refused = not self._all.let_in(self)
        if self._refused:
            error = HttpError(503, "too many connections; try again later", "too_many_connections")
            if self._all.on_refused is not None:
                self._all.on_refused(error)
            self._answer(error, {"retry-after": "1"})
            return
        # Of the base's own accord it waits for a first byte for ever.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self._look()

    def data_received(self, data: bytes) -> None:
        """See the base."""
        if self._refused or self.transport.is_closing():
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """See the base."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """See the base."""
        self._all.gone(self)
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        """See the base."""
        super().timeout_keep_alive_handler()
        self._look()

    def drop(self) -> None:
        """Ends an idle connection at once."""
        self._all.set_idle(self, False)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the shape of all other errors."""
        self._answer(HttpError(400, "this is no valid HTTP request", "invalid_http"), {})

    def _answer(self, error: OutriderError, headers: dict[str, str]) -> None:
        """An answer of the connection's own, which is its last."""
        body = error_body(error).json_bytes()
        more = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=error.http_status, headers=list((headers | more).items()))
        events = (response, h11.Data(body), h11.EndOfMessage())
        try:
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        except h11.LocalProtocolError:  # in the middle of another answer
            self.transport.abort()
            return
        self.transport.close()
        self._look()

    def _look(self) -> None:
        """Finds the state."""
        in_request = self.cycle is not None and not self.cycle.response_complete
        closing = self.transport.is_closing()
        late = not in_request and not closing and self._is_late()
        if self._late is not None and not late:
            self._late.cancel()
            self._late = None
        elif late and self._late is None:
            self._late = self.loop.call_later(self._all.header_seconds, self.transport.abort)
        self._all.set_idle(self, not (in_request or late or closing))
        if not in_request and self._unread is None:
            self._watch_unread(math.inf)

    def _is_late(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])

    def _watch_unread(self, before: float) -> None:
        """Ends a connection whose client has taken nothing since there were `before` bytes left."""
        self._unread = None
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            return  # the application sees for itself whether this one is read
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        elif left:
            self._unread = self.loop.call_later(self._all.stall_seconds, self._watch_unread, left)
