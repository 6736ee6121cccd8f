"""The addresses of a service's peers: those that an option lists, and those of the DNS names among them.

A DNS name stands for all its addresses; it is looked up again and again for changes.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future

from outrider.errors import ConfigError, count_of, reason_of
from outrider.logs import get_logger
from outrider.rpc.transport import check_peer_address, split_host_port

_logger = get_logger(__name__)

DNS_SCHEME = "dns:"


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
