"""`outrider doctor`: find what keeps services from starting, finding each other, or being safe. See docs/tools.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from outrider.cli.cluster import ADDRESS_FIELDS, LINKS, SERVICES, cluster_folders, is_default, link
from outrider.cli.options import (
    add_connect_tls_options,
    add_service_options,
    bound_services,
    find_faults,
    number,
    parse_service_options,
)
from outrider.cli.placement import NGRAM, Placed, is_colocated, is_on_gpu, num_gpus, place_drafts
from outrider.cli.terminal import make_console
from outrider.config.draft import DraftOptions
from outrider.config.service import ServiceOptions, peer_tls
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, count_of
from outrider.rpc.transport import split_host_port, unix_path
from outrider_tools.doctor import Finding, Level, ok, problem
from outrider_tools.doctor.machine import (
    check_disk,
    check_models,
    check_neighbours,
    check_packages,
    check_shared_memory,
)
from outrider_tools.doctor.services import check_doors, check_exposure, check_services, endpoints_of

Addresses = dict[str, dict[str, str]]
"""Addresses of each service, by the names of its options."""
_STYLES = {Level.OK: "green", Level.NOTE: "", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    parser.add_argument(
        "--running",
        action="store_true",
        help="Expect the services to run, as outrider up runs them here or at the addresses given: one that does not "
        "answer is a problem, a port that it uses is none.",
    )
    parser.add_argument("--skip-models", action="store_true", help="Skip models and GPUs, which take seconds to check.")
    parser.add_argument(
        "--timeout",
        type=number(0.05, 3600),
        default=3.0,
        help="Seconds to wait for an answer of a service. Default: 3.",
    )
    add_connect_tls_options(parser)
    for name, who in (("verify", "the gateway"), ("draft", "verify")):
        parser.add_argument(
            f"--{name}",
            type=lambda text: tuple(part.strip() for part in text.split(",") if part.strip()),
            help=f"Addresses that {who} calls, comma separated. Default: the {name} service's own.",
        )
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run all checks. Return exit code 1 if there is a problem."""
    findings = examine(parse_service_options(arguments), arguments)
    bad = any(finding.level is Level.PROBLEM for finding in findings)
    if arguments.json:
        print(json.dumps({"ok": not bad, "findings": [finding.as_dict() for finding in findings]}, indent=1))
    else:
        show(make_console(color=not arguments.no_color), findings)
    return 1 if bad else 0


def _running_services(
    options: Mapping[str, ServiceOptions], arguments: argparse.Namespace, findings: list[Finding]
) -> dict[str, ServiceOptions]:
    """Return the services that `outrider up` runs here, with their addresses; empty if none runs or options give some.

    Findings say which services these are, since the user has not named any.
    """
    is_given = arguments.verify is not None or arguments.draft is not None
    is_given = is_given or not all(
        is_default(one, field) for one in options.values() for field in ADDRESS_FIELDS if hasattr(one, field)
    )
    clusters = {} if is_given else running_clusters()
    if not clusters:
        return {}
    (folder, newest), *others = clusters.items()
    where = ", ".join(f"{name} {addresses['address']}" for name, addresses in newest.items())
    if others:
        rest = ", ".join(f"{other} (gateway {services['gateway']['address']})" for other, services in others)
        text = f"{len(clusters)} clusters run here; this looks at the newest, in {folder}: {where}; not at {rest}"
        fix = "name those of another, like --gateway-address, --verify-address and --draft-address"
        findings.append(Finding("running", Level.NOTE, text, fix))
    else:
        findings.append(ok("running", f"this looks at the services of the cluster in {folder}: {where}"))
    placed = {}
    for name, addresses in newest.items():
        changes: dict[str, Any] = {field: text for field, text in addresses.items() if hasattr(options[name], field)}
        if changes.get("metrics_address") == addresses.get("rest_address"):
            changes["metrics_address"] = ""  # the page has no door of its own
        placed[name] = replace(options[name], **changes)
    return link(placed)


def running_clusters() -> dict[Path, Addresses]:
    """Return addresses of the services of this user's `outrider up` clusters, by cluster folder; newest first."""
    running = {}
    for folder in cluster_folders():
        found = {name: _read(folder / f"{name}.json") for name in SERVICES}
        found = {name: addresses for name, addresses in found.items() if addresses}
        # A cluster that was killed leaves its files behind.
        if {"gateway", "verify"} <= found.keys() and _answers(found["gateway"]["address"]):
            running[folder] = found
    return running


def _read(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {field: str(data[field]) for field in ADDRESS_FIELDS if data.get(field)} if "address" in data else {}


def _answers(address: str) -> bool:
    path = unix_path(address)
    try:
        if path is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
        else:
            host, port = split_host_port(address, "address")
            socket.create_connection((host.strip("[]"), port), timeout=1).close()
    except OSError:
        return False
    return True


def _place(verify: VerifyOptions, draft: DraftOptions, placement: str, findings: list[Finding]) -> Placed | None:
    """Place the drafters as `outrider up` does, and return the options; None if the placement is impossible.

    Findings say where a draft model runs, and why, or what is wrong.
    """
    gpus = num_gpus()
    try:
        placed = place_drafts(verify, draft, placement, gpus, lambda text: findings.append(ok("drafters", text)))
    except ConfigError as error:
        findings.append(problem("placement", error.message, "correct the option"))
        return None
    names = placed.verify.speculative_algorithm
    if not is_colocated(verify, draft, placement, gpus):
        return placed
    if is_on_gpu(verify, gpus):
        inside = ", ".join(name for name in names if name not in NGRAM)
        text = f"{inside} drafts inside verify's rounds; outrider plan tells its memory"
    else:
        text = f"with these options {', '.join(names)} drafts in verify's process, without a draft service"
    findings.append(ok("placement", text))
    return placed


def _drafts(placed: Placed) -> DraftOptions:
    """Return the options of the drafter to check: the draft model inside rounds, or else the draft service's."""
    inside = placed.verify.speculative_algorithm or placed.draft is None
    return placed.verify.draft_model(placed.verify.model) if inside else cast(DraftOptions, placed.draft)


def examine(options: Mapping[str, ServiceOptions], arguments: argparse.Namespace) -> list[Finding]:
    """Return all findings, in the order of the checks."""
    findings = [*check_packages(), *check_disk(), *check_shared_memory(), *check_neighbours()]
    found = _running_services(options, arguments, findings)
    if found and arguments.running:
        # Running services report their own settings, which the options given here need not match.
        planned = found
        findings += [] if arguments.skip_models else check_models(VerifyOptions(model=""), DraftOptions())
    else:
        planned = _plan(options, arguments, findings)
    try:
        endpoints = endpoints_of(found or planned, peer_tls(arguments, "connect"))
    except ConfigError as error:
        if all(error.message not in finding.text for finding in findings):
            findings.append(problem("options", error.message, "correct the options"))
        endpoints = []
    service_findings, serving = asyncio.run(check_services(endpoints, arguments.running, arguments.timeout))
    return [*findings, *check_doors(planned, serving, arguments.running), *check_exposure(planned), *service_findings]


def _plan(
    options: Mapping[str, ServiceOptions], arguments: argparse.Namespace, findings: list[Finding]
) -> dict[str, ServiceOptions]:
    """Return the services that these options start, wired to each other. Add findings on their models and options."""
    verify, draft = cast(VerifyOptions, options["verify"]), cast(DraftOptions, options["draft"])
    placed = _place(verify, draft, arguments.draft_placement, findings)
    if not arguments.skip_models:
        findings += check_models(verify, draft) if placed is None else check_models(placed.verify, _drafts(placed))
    planned = dict(options) if placed is None else bound_services(options, placed)
    for name, field, endpoint in LINKS:
        if (addresses := getattr(arguments, endpoint)) is not None:
            changes: dict[str, Any] = {field: addresses}
            planned[name] = replace(planned[name], **changes)
    reported = [finding.text for finding in findings if finding.level is Level.PROBLEM]
    faults = (text for text in find_faults(planned, num_gpus()) if not any(one in text for one in reported))
    findings += [problem("options", text, "correct the options") for text in faults]
    # Unless services must run, drop default addresses: such services would use sockets that nobody knows yet.
    for name in ("verify", "draft") if not arguments.running else ():
        if name in planned and is_default(planned[name], "address"):
            planned[name] = replace(planned[name], address="")
    return link(planned)


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, its fix below it, and a count."""
    for finding in findings:
        head = Text.assemble(
            (f"{finding.level.value:<8}", _STYLES[finding.level]), f"{finding.check:<14} {finding.text}"
        )
        console.print(head, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':<23}-> {finding.fix}", soft_wrap=True)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    console.print(
        ", ".join(count_of(count, level.value, "ok" * (level is Level.OK)) for level, count in counts.items())
    )
