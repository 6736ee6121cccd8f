"""The machine without its GPUs: packages, shared memory, namespaces, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from outrider.cli.placement import num_gpus
from outrider.host.line import host_id
from outrider.models.store import default_cache_dir
from outrider_tools.doctor import Finding, ok, problem, warning

_GIB = 2**30
_LEAST_CACHE = _GIB
"""The default model needs 0.8 GB for a moment; others need their size."""
_LEAST_SHM = 64 << 20
_OPTIONAL = ("triton", "flashinfer-python", "humming-kernels")
_TOLD = ("torch", "triton", "flashinfer-python", "humming-kernels", "grpcio", "protobuf", "tokenizers", "llguidance")


def check_packages() -> Iterator[Finding]:
    """Versions, and those that are out of the range that Outrider asks for."""
    found = {name: _version(name) for name in _TOLD}
    text = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    missing = [name for name in _OPTIONAL if not found[name]]
    yield ok("packages", text + (f"; not installed: {', '.join(missing)} (only GPUs use them)" if missing else ""))
    wrong = list(_out_of_range())
    if wrong:
        yield problem("packages", "; ".join(wrong), "pip install -r requirements.txt, or make setup")


def _out_of_range() -> Iterator[str]:
    try:
        wanted = [Requirement(text) for text in requires("outrider") or ()]
    except PackageNotFoundError:
        return
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        number = _version(requirement.name)
        if not number:
            yield f"{requirement.name} is not installed, {requirement.specifier} is wanted"
        elif not requirement.specifier.contains(number.partition("+")[0], prereleases=True):
            yield f"{requirement.name} is {number}, {requirement.specifier} is wanted"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def check_shared_memory() -> Iterator[Finding]:
    """Room in /dev/shm, and the namespaces that two services on one GPU host must share (docs/gpu.md)."""
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        text = f"/dev/shm: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
        fix = "give the container more: --shm-size=1g, or shm_size in Compose"
        yield ok("shared memory", text) if usage.free >= _LEAST_SHM else warning("shared memory", text, fix)
    own = namespaces("self")
    if own and num_gpus():
        text = f"IPC {own['ipc']}, PID {own['pid']}, host {host_id()[:8] or 'unknown'}"
        yield ok("namespaces", f"{text}; where verify and draft see the same three, they share the GPU's memory")


def namespaces(pid: int | str) -> dict[str, str]:
    """Numbers of a process's IPC and PID namespaces; empty where the system does not tell, or not to this user."""
    try:
        links = {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in ("ipc", "pid")}
    except OSError:
        return {}
    return {name: link.partition("[")[2].rstrip("]") for name, link in links.items()}


def check_neighbours() -> Iterator[Finding]:
    """Whether verify and draft services that run here could share GPU memory."""
    found: dict[str, dict[str, dict[str, str]]] = {"verify_service": {}, "draft_service": {}}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        for module in found:
            spaces = namespaces(process.pid) if module in words else {}
            if spaces:
                found[module][f"{module} {process.pid}"] = spaces
    apart = [
        f"{one} and {other}"
        for one, spaces in found["verify_service"].items()
        for other, others in found["draft_service"].items()
        if spaces != others
    ]
    if apart:
        fix = "where both are on GPUs of this host, let them share both namespaces (docs/gpu.md)"
        text = f"{', '.join(apart)} are in different IPC or PID namespaces: features travel by gRPC"
        yield warning("namespaces", text, fix)
    elif all(found.values()):
        yield ok("namespaces", "verify and draft services that run here share IPC and PID namespaces")


def check_disk() -> Iterator[Finding]:
    """Room where models are kept."""
    folder = default_cache_dir()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield problem("disk", f"{folder} cannot be written", "set OUTRIDER_HOME to a folder of your own")
        return
    free = shutil.disk_usage(there).free
    text = f"{folder}: {free / _GIB:.1f} GiB free"
    if free < _LEAST_CACHE:
        yield warning("disk", text, "free some, or set OUTRIDER_HOME to another disk: a model needs its size")
    else:
        yield ok("disk", text)
