"""Names of our own: a network with only loopback, a DNS server on it, and a resolv.conf that points to it. Linux."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from dnslib import QTYPE, RCODE, RR, A
from dnslib.server import BaseResolver, DNSLogger, DNSServer

SERVER = "127.0.0.1"
DOMAIN = "outrider.svc.cluster.local"
SECONDS_TO_LIVE = 1
_INSIDE = "OUTRIDER_OWN_NAMES"
_NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
_RESOLVER = (
    f"search {DOMAIN} svc.cluster.local cluster.local\nnameserver {SERVER}\noptions ndots:5 timeout:1 attempts:2\n"
)


def can_have_own_names() -> bool:
    """Whether this system lets this user make network and mount namespaces."""
    try:
        return subprocess.run([*_NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def enter_own_names() -> None:
    """Run this program again in a network with only loopback, where 127.0.0.1 resolves names. Return only there."""
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        os.execvp(_NAMESPACES[0], [*_NAMESPACES, sys.executable, *sys.orig_argv[1:]])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.NamedTemporaryFile("w", prefix="resolv-") as file:
        file.write(_RESOLVER)
        file.flush()
        Path(file.name).chmod(0o644)
        subprocess.run(["mount", "--bind", file.name, "/etc/resolv.conf"], check=True)


class NameServer(BaseResolver):  # type: ignore[misc]
    """A DNS server with the addresses of pods under the names of their headless Services. Use it with `with`."""

    def __init__(self) -> None:
        self._addresses: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        """Number of questions for addresses, by name."""
        self._server = DNSServer(self, address=SERVER, port=53, logger=DNSLogger(logf=lambda text: None))

    def __enter__(self) -> NameServer:
        self._server.start_thread()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop()
        self._server.server.server_close()

    def add(self, name: str, address: str) -> None:
        """Add a pod that is ready."""
        with self._lock:
            self._addresses.setdefault(name, []).append(address)

    def remove(self, name: str, address: str) -> None:
        """Remove a pod that is not ready, or will stop. An unknown pod is ignored."""
        with self._lock:
            if address in self._addresses.get(name, ()):
                self._addresses[name].remove(address)

    def resolve(self, request: Any, handler: Any) -> Any:
        """Answer a question. dnslib calls this from its own threads."""
        reply = request.reply()
        name = str(request.q.qname).rstrip(".").removesuffix(f".{DOMAIN}")
        with self._lock:
            known = name in self._addresses
            addresses = list(self._addresses.get(name, ()))
        if not known:
            reply.header.rcode = RCODE.NXDOMAIN
        elif request.q.qtype == QTYPE.A:
            self.asked[name] += 1
            for address in addresses:
                reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(address), ttl=SECONDS_TO_LIVE))
        return reply
