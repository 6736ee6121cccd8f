"""By which names the REST door may be called.

A page of any site can have its name resolve to 127.0.0.1 and then reads what it likes from a door on loopback: for the
browser it is the site's own (DNS rebinding). What gives it away is the name in the Host header. Plain addresses are no
names and resolve to nothing, so they are always let in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import HttpError, error_response
from outrider.rpc.transport import is_local


class HostRule:
    """Which Host headers are let in."""

    def __init__(self, address: str, allowed: Sequence[str] = (), *, guarded: bool = False) -> None:
        """`address` is what the door is bound to. `guarded`: it has keys or TLS, and no page gets in by its name."""
        self._any = "*" in allowed or (not allowed and (guarded or not is_local(address)))
        names = {"localhost", address.rpartition(":")[0].lower(), *(name.lower() for name in allowed)}
        self._names = {name for name in names if not name.startswith("*")}
        self._endings = (".localhost", *(name[1:] for name in names if name.startswith("*.")))

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises HttpError for a name that is not let in. Browsers always send one."""
        host = headers.get("host", "")
        if self._any or not host:
            return
        name = _name(host)
        if name in self._names or name.endswith(self._endings) or _is_address(name):
            return
        raise HttpError(
            421,
            f"the host {host[:80]!r} is not served here; call it localhost, or start the gateway with --allowed-hosts",
            "host_not_allowed",
        )

    def guard(self, app: ASGIApp) -> ASGIApp:
        """An application before which the rule stands."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                self.check(Headers(scope=scope))
            except HttpError as error:
                await error_response(error)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return guarded


def _name(host: str) -> str:
    """Without the port and a last dot, in small letters."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
