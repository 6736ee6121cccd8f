"""`outrider up`: run the services until Ctrl-C."""

from __future__ import annotations

import argparse
import queue
import signal
from collections.abc import Collection, Iterator

from rich.console import Console

from outrider.cli.child import ServiceFailedError
from outrider.cli.cluster import ADDRESS_FIELDS, Cluster, flag_names, service_flags
from outrider.cli.options import add_service_options, given_service_flags, make_cluster
from outrider.cli.terminal import drafters_text, log_printer, make_console, print_steadily
from outrider.errors import ConfigError
from outrider.rpc.transport import is_local


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--ephemeral", action="store_true", help="Use free ports instead of the default ones.")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start the services, print what they are and where they listen, and run until interrupted."""
    console = make_console(color=not arguments.no_color)
    services: list[str] = []
    try:
        cluster = make_cluster(
            arguments, console, log_printer(console), fixed_ports=not arguments.ephemeral, supervise=True
        )
        services = cluster.services
        with cluster:
            try:
                _print_summary(console, cluster)
                _wait_for_end()
            except KeyboardInterrupt:
                pass
            seconds = cluster.drain_seconds
            words = f"requests that still run get up to {seconds:g} s to finish; " if seconds else ""
            print_steadily(console, f"outrider: stopping; {words}Ctrl-C again kills")
            endings = cluster.close()
    except (ServiceFailedError, ConfigError) as error:
        raise type(error)(error.message + port_hint(error.message, services, arguments)) from error
    print_steadily(console, "outrider: " + ", ".join(f"{name} {ending}" for name, ending in endings.items()))
    return 0


def _wait_for_end() -> None:
    """Wait for a signal that asks for the end; Ctrl-C raises KeyboardInterrupt. Such signals have no effect later.

    They may come twice: GNU timeout, for one, sends its signal to the process and then to the whole group. Only Ctrl-C
    while requests still run kills.
    """
    asked = queue.SimpleQueue[None]()  # safe in signal handlers, unlike an Event
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: asked.put(None))
    asked.get()


def port_hint(message: str, services: Collection[str], arguments: argparse.Namespace) -> str:
    """Return advice on how to choose other ports if `message` says that one cannot be bound, else empty text.

    `services`: those that were started; their messages name their own options.
    """
    if "cannot bind" not in message:
        return ""
    doors = [flag for flag in service_flags() if flag.option.name in ADDRESS_FIELDS]
    given = given_service_flags(arguments)  # --ephemeral would not change ports given by these flags
    is_default = any(f"{door.flag}: cannot bind" in message and door.flag not in given for door in doors)
    free = "\nFor free ports add --ephemeral." if (services or is_default) and not arguments.ephemeral else ""
    named = [door.flag for door in doors if door.service in services]
    return free + (f"\nTo choose ports: {', '.join(named)}." if named else "")


def _open_doors(cluster: Cluster) -> Iterator[str]:
    flags = flag_names()
    for (service, field), flag in flags.items():
        if service not in cluster.services or field not in ("address", "rest_address"):
            continue
        options, address = cluster.options(service), cluster.address(service, field)
        if not options.is_guarded and not is_local(address):
            token = flags.get((service, "auth_token_file"))
            fix = f"set {token}" if token else options.key_fix
            yield f"{flag} {address}: anyone who can reach it can use it; {fix}"


def _print_summary(console: Console, cluster: Cluster) -> None:
    verify = cluster.verify.ready_info
    rows = [
        ("model", f"{verify['model']} in {verify['dtype']}, context {verify['context_length']}"),
        ("device", verify["device"]),
        ("drafts", drafters_text(cluster.drafters)),
        ("page", cluster.page_url),
        ("REST", f"{cluster.rest_url}/v1"),
        ("gRPC", cluster.gateway_address),
        *((name, cluster.address(name)) for name in ("verify", "draft") if name in cluster.services),
        *((f"metrics of {name}", cluster.metrics_url(name)) for name in cluster.services),
        *(("warning", text) for text in _open_doors(cluster)),
    ]
    lines = [f"  {name:<19} {where}" for name, where in rows if where]
    # Print in one piece, so that log lines of services cannot come in between.
    print_steadily(console, "\n".join(["\nOutrider is up. Ctrl-C stops it.", *lines, ""]))
