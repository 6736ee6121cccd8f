"""Worlds of the chaos benchmark: a cluster of services, what stands between them, and ways to harm it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.chaos.link import Link
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.relay import Relay
from outrider.cli.child import LineSink
from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.verify import VerifyOptions

ROOT = Path(__file__).resolve().parents[2]
DISK_BYTES = 1048576
DRAFT_PORT = 50053
METRICS_PORT = 9103


@dataclass
class World:
    """A running cluster, and what its kind of world puts between verify and draft or below their logs."""

    cluster: Cluster
    relay: Relay | None = None
    proxy: Proxy | None = None
    link: Link | None = None
    disk: Path | None = None
    """Folder of the services' logs."""
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids of the services as of their last start."""

    def note_pids(self) -> None:
        """Note the services' process ids, once they run as they should."""
        self.pids = {name: child.pid for name, child in self.cluster.children.items()}

    async def restart(self, name: str) -> None:
        """Start a service again without blocking the event loop, and wait until it serves."""
        await asyncio.to_thread(self.cluster.restart, name)
        self.pids[name] = self.cluster.children[name].pid

    async def kill(self, name: str) -> None:
        """Send SIGKILL to all processes of a service."""
        await asyncio.to_thread(self.cluster.children[name].kill)

    @property
    def num_alive(self) -> int:
        """Number of services that still run as the process that was started."""
        children = self.cluster.children.items()
        return sum(child.running and child.pid == self.pids[name] for name, child in children)


@dataclass(frozen=True)
class Setup:
    """Options that all worlds have in common."""

    verify: VerifyOptions
    draft: DraftOptions
    gateway: GatewayOptions
    vocab_size: int
    seed: int = 0
    on_line: LineSink = lambda name, line: None


@asynccontextmanager
async def open_world(kind: str, setup: Setup) -> AsyncIterator[World]:
    """Start a world of a kind in `WORLDS`; it is ready inside the context."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ochaos-")))
        world = await WORLDS[kind](stack, setup, folder)
        world.note_pids()
        yield world


async def _plain(stack: AsyncExitStack, setup: Setup, folder: Path) -> World:
    """Make services that talk to each other directly."""
    return World(await _cluster(stack, setup))


async def _relayed(stack: AsyncExitStack, setup: Setup, folder: Path) -> World:
    """Put a relay between verify and draft, which may change messages."""
    door, target = f"unix:{folder}/relay", f"unix:{folder}/draft"
    relay = await stack.enter_async_context(Relay(door, target, setup.vocab_size, setup.seed))
    return World(await _cluster(stack, _between(setup, door, target)), relay=relay)


async def _proxied(stack: AsyncExitStack, setup: Setup, folder: Path) -> World:
    """Put a proxy between verify and draft, which may be a bad network."""
    door, target = f"unix:{folder}/proxy", f"unix:{folder}/draft"
    proxy = await stack.enter_async_context(Proxy(door, target, setup.seed))
    return World(await _cluster(stack, _between(setup, door, target)), proxy=proxy)


async def _linked(stack: AsyncExitStack, setup: Setup, folder: Path) -> World:
    """Put the draft in its own network namespace."""
    link = stack.enter_context(Link(setup.seed))
    address = f"{link.far}:{DRAFT_PORT}"
    setup = _between(setup, address, address)
    setup = replace(setup, draft=replace(setup.draft, metrics_address=f"{link.far}:{METRICS_PORT}"))
    cluster = await _cluster(stack, setup, {"draft": "benchmarks.chaos.child"}, CHAOS_NAMESPACE=link.path)
    return World(cluster, link=link)


async def _logged(stack: AsyncExitStack, setup: Setup, folder: Path) -> World:
    """Send logs to a small disk; without the right to mount one, to a device that is always full."""
    disk = folder / "logs"
    disk.mkdir()
    if not stack.enter_context(small_disk(disk)):
        disk = Path("/dev/full")
    names = ("draft", "verify", "gateway")
    options = {name: replace(getattr(setup, name), log_level="DEBUG") for name in names}
    modules = dict.fromkeys(names, "benchmarks.chaos.child")
    return World(await _cluster(stack, replace(setup, **options), modules, CHAOS_LOGS=str(disk)), disk=disk)


WORLDS: dict[str, Callable[[AsyncExitStack, Setup, Path], Awaitable[World]]] = {
    "plain": _plain,
    "relayed": _relayed,
    "proxied": _proxied,
    "linked": _linked,
    "logged": _logged,
}


def _between(setup: Setup, door: str, target: str) -> Setup:
    """Let verify dial `door` and the draft serve `target`. A line between engines would bypass what is between."""
    draft = replace(setup.draft, address=target, local_line="off")
    return replace(setup, verify=replace(setup.verify, draft=(door,)), draft=draft)


async def _cluster(
    stack: AsyncExitStack, setup: Setup, modules: Mapping[str, str] | None = None, **env: str
) -> Cluster:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    cluster = Cluster(
        verify=setup.verify,
        draft=setup.draft,
        gateway=setup.gateway,
        on_line=setup.on_line,
        modules=modules,
        env={**os.environ, "PYTHONPATH": path, **env},
    )
    await asyncio.to_thread(cluster.__enter__)
    stack.push_async_callback(asyncio.to_thread, cluster.close)
    return cluster


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a disk of `DISK_BYTES` at a folder. Yields whether that was allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
