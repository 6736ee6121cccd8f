"""What befalls the services: each case as a context, within which the fault is on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from chaos_link import Air
from chaos_proxy import Weather
from chaos_worlds import World

from outrider.cli.child import exit_text

FLAP_SECONDS = 1.0
DISCONNECT_SECONDS = 0.7

Thing = TypeVar("Thing")

Fault = Callable[[World, random.Random], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Case:
    """A fault, where it happens, and what it may do."""

    title: str
    world: str
    fault: Fault
    seen: str
    """What users see, for the documentation."""
    lasts: float = 1.0
    """Of the usual time; 0 where the fault is over once it has happened."""
    may_fail: bool = False
    """Streams under way may end with an error: what answers them is gone."""
    may_refuse: bool = False
    """New requests may be refused."""


@asynccontextmanager
async def killed(world: World, draw: random.Random, name: str) -> AsyncIterator[None]:
    """SIGKILL; started again at the end."""
    await world.kill(name)
    yield
    await world.restart(name)


@asynccontextmanager
async def stopped(world: World, draw: random.Random, name: str) -> AsyncIterator[None]:
    """SIGSTOP, and at the end SIGCONT."""
    world.cluster.children[name].pause()
    try:
        yield
    finally:
        world.cluster.children[name].resume()


@asynccontextmanager
async def restarted(world: World, draw: random.Random, name: str) -> AsyncIterator[None]:
    """SIGTERM, drain, and a new start."""
    await world.restart(name)
    yield


@asynccontextmanager
async def flapping(world: World, draw: random.Random) -> AsyncIterator[None]:
    """The draft is killed and started again, and killed again within a second of serving."""

    over = asyncio.Event()

    async def flap() -> None:
        while not over.is_set():
            await world.kill("draft")
            await world.restart("draft")
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), FLAP_SECONDS * draw.random())

    task = asyncio.create_task(flap())
    try:
        yield
    finally:
        over.set()
        await task


@asynccontextmanager
async def drained(world: World, draw: random.Random) -> AsyncIterator[None]:
    """SIGTERM to the gateway: what runs finishes, what is new is refused. Started again at the end."""
    child = world.cluster.gateway
    child.terminate()
    yield
    if not await asyncio.to_thread(child.wait, 30.0) or child.poll():
        raise RuntimeError(f"the gateway did not drain and end: {exit_text(child.poll() or 0)}")
    await world.restart("gateway")


@asynccontextmanager
async def corrupted(world: World, draw: random.Random, kind: str) -> AsyncIterator[None]:
    """The draft's messages are what `CORRUPTIONS[kind]` makes of them."""
    relay = _there(world.relay, "relay")
    relay.corrupt(kind)
    try:
        yield
    finally:
        relay.corrupt("passed")


@asynccontextmanager
async def disguised(world: World, draw: random.Random, **fields: object) -> AsyncIterator[None]:
    """The draft's hello says something else; its session begins anew."""
    relay = _there(world.relay, "relay")
    relay.disguise(**fields)
    try:
        yield
    finally:
        relay.disguise()


@asynccontextmanager
async def weathered(world: World, draw: random.Random, weather: Weather) -> AsyncIterator[None]:
    """The proxy between verify and draft is a bad network."""
    proxy = _there(world.proxy, "proxy")
    proxy.set(weather)
    try:
        yield
    finally:
        proxy.set(Weather())


@asynccontextmanager
async def disconnected(world: World, draw: random.Random) -> AsyncIterator[None]:
    """All connections between verify and draft are reset, again and again."""
    proxy = _there(world.proxy, "proxy")

    async def disconnect() -> None:
        while True:
            proxy.disconnect()
            await asyncio.sleep(2 * DISCONNECT_SECONDS * draw.random())

    async with _meanwhile(disconnect()):
        yield


@asynccontextmanager
async def aired(world: World, draw: random.Random, air: Air) -> AsyncIterator[None]:
    """Packets between the namespaces of verify and draft are late or lost."""
    link = _there(world.link, "link")
    link.air = air
    try:
        yield
    finally:
        link.air = Air()


@asynccontextmanager
async def full_disk(world: World, draw: random.Random) -> AsyncIterator[None]:
    """The disk that logs go to has no room left; on a device that is always full, nothing more happens."""
    disk = _there(world.disk, "disk")
    filler = disk / "filler"
    if not disk.is_dir():
        yield
        return
    try:
        with filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
    except OSError:
        pass  # it is full
    try:
        yield
    finally:
        filler.unlink()


@asynccontextmanager
async def misused(
    world: World, draw: random.Random, client: Callable[[World, int], Coroutine[None, None, None]], count: int
) -> AsyncIterator[None]:
    """So many misbehaving clients beside the load."""
    async with _meanwhile(*(client(world, draw.randrange(2**32)) for _ in range(count))):
        yield


@asynccontextmanager
async def _meanwhile(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Work that goes on within the context. What it raises comes out at the end."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def _there(thing: Thing | None, name: str) -> Thing:
    if thing is None:
        raise RuntimeError(f"this world has no {name}")
    return thing
