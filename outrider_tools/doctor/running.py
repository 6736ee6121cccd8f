"""What `outrider up` runs on this machine: the addresses that its services report, for who looks for them."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.cli.cluster import ADDRESS_FIELDS, SERVICES, is_default
from outrider.config.service import ServiceOptions
from outrider.rpc.transport import split_host_port, unix_path

Addresses = dict[str, dict[str, str]]
"""Of each service, by the names of its options."""


def are_all_default(options: Mapping[str, ServiceOptions]) -> bool:
    """Whether nothing says where the services are."""
    return all(is_default(one, field) for one in options.values() for field in ADDRESS_FIELDS if hasattr(one, field))


def with_addresses(options: Mapping[str, ServiceOptions], found: Addresses) -> dict[str, ServiceOptions]:
    """The options with the addresses that were found; a draft that does not run is called by nobody."""
    placed = dict(options)
    for name, addresses in found.items():
        changes: dict[str, Any] = {field: text for field, text in addresses.items() if hasattr(placed[name], field)}
        if changes.get("metrics_address") == addresses.get("rest_address"):
            changes["metrics_address"] = ""  # the page has no door of its own
        placed[name] = replace(placed[name], **changes)
    if "draft" not in found:
        nobody: dict[str, Any] = {"draft": ()}
        placed["verify"] = replace(placed["verify"], **nobody)
        placed["draft"] = replace(placed["draft"], address="127.0.0.1:0", metrics_address="")
    return placed


def running_cluster() -> Addresses:
    """Addresses of the services that this user's newest `outrider up` runs; empty where none runs."""
    folders = [path for path in Path(tempfile.gettempdir()).glob("outrider-*") if _is_own_folder(path)]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        found = {name: _read(folder / f"{name}.json") for name in SERVICES}
        found = {name: addresses for name, addresses in found.items() if addresses}
        # One that was killed leaves its files behind.
        if {"gateway", "verify"} <= found.keys() and _answers(found["gateway"]["address"]):
            return found
    return {}


def _is_own_folder(path: Path) -> bool:
    """Other users may put folders of any name there."""
    return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()


def _read(path: Path) -> dict[str, str]:
    try:
        told = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {field: str(told[field]) for field in ADDRESS_FIELDS if told.get(field)} if "address" in told else {}


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
