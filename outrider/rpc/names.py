"""DNS names among the addresses of peers: a name stands for all addresses behind it, and is followed as they change."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future

from outrider.errors import ConfigError, reason_of
from outrider.logs import get_logger
from outrider.rpc.transport import check_peer_address, split_host_port

Lookup = Callable[[str, int], Awaitable[Collection[str]]]
"""All addresses, "host:port", of a host's name and a port. Raises OSError or UnicodeError."""

_logger = get_logger(__name__)

_SCHEME = "dns:"


class PeerAddresses:
    """Addresses as an option lists them, those behind "dns:///name:port" in the name's place.

    A channel of gRPC to such a name, spelled as gRPC spells it, would keep to one of its addresses, or take one call
    after the other to the next. Who must know its peers apart needs a channel to each.
    """

    def __init__(
        self,
        given: Sequence[str],
        option: str,
        *,
        seconds: float,
        lookup: Lookup | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`seconds` lie between two look-ups. Raises ConfigError, naming `option`, for what is no address."""
        self._seconds = seconds
        self._lookup = lookup or look_up
        self._sleep = sleep
        self._names: dict[str, tuple[str, int]] = {}
        self._found: dict[str, tuple[str, ...]] = {}
        """By entry of the list, what it stands for: of a name the last answer that was good."""
        self._problems: dict[str, str] = {}
        for address in given:
            if address.startswith(_SCHEME):
                self._names[address] = _split_name(address, option)
                self._found[address] = ()
            else:
                check_peer_address(address, option)
                self._found[address] = (address,)

    def __bool__(self) -> bool:
        """Whether any address or name is given."""
        return bool(self._found)

    @property
    def now(self) -> tuple[str, ...]:
        """What is known now, each address once; nothing of names before `follow` has looked."""
        return tuple(dict.fromkeys(address for found in self._found.values() for address in found))

    async def follow(self) -> AsyncIterator[tuple[str, ...]]:
        """Yields the addresses, and again whenever they have changed; ends where there are no names.

        A look-up that fails or finds nothing changes nothing: a DNS server that is away takes no peer along, and of
        peers that have gone their own connections tell.
        """
        last = self.now
        if last:
            yield last
        while self._names:
            await asyncio.gather(*(self._look(name) for name in self._names))
            if self.now != last:
                last = self.now
                yield last
            await self._sleep(self._seconds)

    async def _look(self, name: str) -> None:
        found: tuple[str, ...] = ()
        try:
            found = tuple(sorted(await self._lookup(*self._names[name])))
            problem = "" if found else "it has no address"
        except (OSError, UnicodeError) as error:
            problem = reason_of(error)
        if problem and problem != self._problems.get(name):
            kept = f"{len(self._found[name])} addresses of before are kept"
            _logger.warning("%s cannot be looked up: %s; %s", name, problem, kept if self._found[name] else "waiting")
        self._problems[name] = problem
        if found and found != self._found[name]:
            self._found[name] = found
            _logger.info("%s is now %s", name, ", ".join(found))


async def look_up(host: str, port: int) -> Collection[str]:
    """Ask the system's resolver, which knows /etc/hosts and search domains.

    IPv6 addresses only where there are none of IPv4: a replica with one of each must not count twice.
    """
    answer: Future[Collection[str]] = Future()
    answer.set_running_or_notify_cancel()  # so that it takes an answer also when nobody waits for it any more

    def ask() -> None:
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)
        else:
            found = {f"{place[0]}:{port}" for family, *_, place in places if family == socket.AF_INET}
            answer.set_result(found or {f"[{place[0]}]:{port}" for *_, place in places})

    # Not in the loop's pool, whose threads the process waits for at its end: a server that is away takes long to ask.
    threading.Thread(target=ask, name=f"look up {host}", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _split_name(address: str, option: str) -> tuple[str, int]:
    """Host and port of "dns:///host:port" or "dns:host:port". Raises ConfigError."""
    rest = address.removeprefix(_SCHEME)
    if rest.startswith("//"):
        server, slash, rest = rest.removeprefix("//").partition("/")
        if server or not slash:
            raise ConfigError(
                f"{option}: {address!r} names a DNS server; write dns:///name:port, which asks those of this machine"
            )
    return split_host_port(rest, option)
