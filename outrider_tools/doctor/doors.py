"""Checks of doors before they open: whether an address is free, who holds it, and who can reach it."""

from __future__ import annotations

import errno
import operator
import os
import socket
import stat
from collections.abc import Iterator, Mapping

import psutil

from outrider.cli.cluster import ADDRESS_FIELDS, MODULES, ServiceFlag, flag_names, is_default, service_flags
from outrider.config.base import expand
from outrider.config.gateway import GatewayOptions
from outrider.config.service import ServiceOptions
from outrider.errors import ConfigError, reason_of
from outrider.rpc.server import bind_error, bind_fix
from outrider.rpc.transport import check_address, is_local, split_host_port, unix_path
from outrider_tools.doctor import Finding, note, ok, problem, warning


def doors_of(options: Mapping[str, ServiceOptions]) -> Iterator[tuple[ServiceFlag, str]]:
    """Yield every address that these services bind, with the option that sets it."""
    flags = {(flag.service, flag.option.name): flag for flag in service_flags()}
    for name, one in options.items():
        for field in ADDRESS_FIELDS:
            if address := getattr(one, field, ""):
                yield flags[name, field], address


def check_doors(
    options: Mapping[str, ServiceOptions], serving: Mapping[str, str], must_run: bool = False
) -> Iterator[Finding]:
    """Check for every door whether it is free or who has taken it. `serving` maps addresses that answered to services.

    If services `must_run`, a door taken by its own service is fine; otherwise a start would fail.
    """
    taken_ports: dict[str, ServiceFlag] = {}
    for door, address in doors_of(options):
        try:
            (check_address if door.option.name == "address" else split_host_port)(address, door.flag)
        except ConfigError as error:
            yield problem("port", error.message, "correct the address")
            continue
        first = taken_ports.setdefault(address, door)
        if first is not door and not address.endswith(":0"):
            yield problem("port", f"{door.flag} {address} is {first.flag}'s too", "give each door its own port")
            continue
        # A service that runs should also have its other doors where an option names them.
        is_other = door.option.name != "address" and not is_default(options[door.service], door.option.name)
        expected = is_other and not address.endswith(":0") and door.service in serving.values()
        yield _check_free(door, address, serving, must_run, expected)


def _check_free(door: ServiceFlag, address: str, serving: Mapping[str, str], must_run: bool, expected: bool) -> Finding:
    said = f"{door.flag} {address}"
    path = unix_path(address)
    reason, holder, pid = "", serving.get(address, ""), None
    if path is None:
        try:
            reason = bind_error(*split_host_port(address, door.flag))
        except OSError as error:
            return problem("port", f"{said}: {reason_of(error)}", "correct the host")
        if reason:
            pid = listener_of(address)
            holder = holder or _service_of(pid)
    elif not holder:
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            return problem("port", f"{said}: {path.parent} cannot be written", "choose another folder")
        if path.exists():
            return note("port", f"{said}: the file is there, of a service that does not answer or was killed")
    if holder == door.service:
        text = f"{said}: taken by a running {holder}" + (f", process {pid}" if pid else "")
        if must_run:
            return ok("port", text)
        fix = "to start a second one: outrider up --ephemeral; to check the running one: outrider doctor --running"
        return warning("port", text, fix)
    if not reason and not holder:
        if must_run and expected:
            return problem("port", f"{said}: nobody listens there", f"name the address that {door.service} has")
        return ok("port", f"{said}: {'takes a free port' if address.endswith(':0') else 'free'}")
    if not holder and must_run and reason == os.strerror(errno.EADDRNOTAVAIL):
        return note("port", f"{said}: not an address of this machine, and not looked at")
    if not holder and reason != os.strerror(errno.EADDRINUSE):
        return problem("port", f"{said}: {reason}", bind_fix(reason))
    text = f"{said}: {reason or 'taken'}; {_name_of(pid, holder)}"
    return problem("port", text, "end it, or choose another port (0 takes a free one)")


def listener_of(address: str) -> int | None:
    """Return the pid of the process that has taken host:port: 0 for nobody, None if the system does not tell.

    Raises OSError for a host that is not found.
    """
    host, port = split_host_port(address, "address")
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    hosts = {str(target[0]) for *_, target in found}
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    listening = [
        (one.laddr.ip.removeprefix("::ffff:"), one.pid)
        for one in connections
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
    ]
    # One that listens on all interfaces has each of their addresses, and any of those keeps others off all interfaces.
    for has in (operator.eq, _includes, lambda there, wanted: _includes(wanted, there)):
        for there, pid in listening:
            if any(has(there, one) for one in hosts):
                return pid
    return 0


def _includes(every: str, host: str) -> bool:
    """Whether `every` is all interfaces, with those of IPv4 among those of IPv6, and not just `host`."""
    return every == "::" or (every == "0.0.0.0" and ":" not in host)


def _service_of(pid: int | None) -> str:
    """Return the service of Outrider that a process is; empty if it is none."""
    try:
        words = psutil.Process(pid).cmdline() if pid else []
    except psutil.Error:
        return ""
    return next((name for name, module in MODULES.items() if module in words), "")


def _name_of(pid: int | None, service: str) -> str:
    if service:
        return f"{service} of Outrider has it" + (f", process {pid}" if pid else "")
    if pid is None:
        return "the system does not say which process has it: perhaps another user's"
    if pid == 0:
        return "nobody listens there"
    try:
        return f"process {pid} ({psutil.Process(pid).name()}) has it"
    except psutil.Error:
        return f"process {pid} has it"


def check_exposure(options: Mapping[str, ServiceOptions]) -> Iterator[Finding]:
    """Find doors that others can reach without a key or without TLS, and key files that others can read."""
    quiet = True
    for door, address in doors_of(options):
        if is_local(address):
            continue
        quiet = False
        yield from _check_open(door, address, options[door.service])
    for name, one in options.items():
        secrets = ("_token_file", "api_key_file", "tls_key")
        for path in (expand(value) for option, value in vars(one).items() if option.endswith(secrets) and value):
            if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
                quiet = False
                yield warning("exposure", f"{name}: {path} can be read by other users", f"chmod 600 {path}")
    if quiet:
        yield ok("exposure", "every address is reached from this machine alone (loopback or a unix socket)")


def _check_open(door: ServiceFlag, address: str, options: ServiceOptions) -> Iterator[Finding]:
    said = f"{door.flag} {address} can be reached from other machines"
    if door.option.name == "metrics_address":
        yield warning("exposure", f"{said}, without key or TLS", "bind it to loopback or to a network of scrapers")
        return
    lacking, names = [], flag_names()
    secret = "api_key" if isinstance(options, GatewayOptions) else "auth_token"
    if not getattr(options, secret) and not getattr(options, f"{secret}_file"):
        lacking.append(("without a key", names[door.service, f"{secret}_file"]))
    if not options.tls_cert:
        lacking.append(("without TLS", f"{names[door.service, 'tls_cert']} and {names[door.service, 'tls_key']}"))
    if lacking:
        words, flags = (" and ".join(part) for part in zip(*lacking, strict=True))
        yield warning("exposure", f"{said} {words}", f"set {flags} (docs/operations.md), or bind to 127.0.0.1")
    else:
        yield ok("exposure", f"{said}, with key and TLS")
