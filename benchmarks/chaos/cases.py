"""The faults, each as a context that is left when the fault ends, and the list of all cases in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from benchmarks.chaos.clients import unread, vanishing
from benchmarks.chaos.link import Air
from benchmarks.chaos.proxy import Weather
from benchmarks.chaos.worlds import World
from outrider.errors import exit_text

FLAP_SECONDS = 1.0
DISCONNECT_SECONDS = 0.7

Thing = TypeVar("Thing")

Fault = Callable[[World, random.Random], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class ChaosCase:
    """A fault, the world it happens in, and its permitted effects."""

    title: str
    world: str
    fault: Fault
    seen: str
    """What users see, for the documentation."""
    lasts: float = 1.0
    """Share of the usual time; 0 if the fault happens once and is over."""
    may_fail: bool = False
    """Running streams may end with an error, since the service that answers them is gone."""
    may_refuse: bool = False
    """New requests may be refused."""


@asynccontextmanager
async def killed(world: World, draw: random.Random, name: str) -> AsyncIterator[None]:
    """Send SIGKILL; start the service again at the end."""
    await world.kill(name)
    yield
    await world.restart(name)


@asynccontextmanager
async def stopped(world: World, draw: random.Random, name: str) -> AsyncIterator[None]:
    """Send SIGSTOP, and at the end SIGCONT."""
    world.cluster.children[name].pause()
    try:
        yield
    finally:
        world.cluster.children[name].resume()


@asynccontextmanager
async def restarted(world: World, draw: random.Random, name: str) -> AsyncIterator[None]:
    """Send SIGTERM, let the service drain, and start it again."""
    await world.restart(name)
    yield


@asynccontextmanager
async def flapping(world: World, draw: random.Random) -> AsyncIterator[None]:
    """Kill the draft and start it again, over and over; each time it serves for less than a second."""

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
    """Send SIGTERM to the gateway: running requests finish, new ones are refused. Start it again at the end."""
    child = world.cluster.gateway
    child.terminate()
    yield
    if not await asyncio.to_thread(child.wait, 30.0) or child.poll():
        raise RuntimeError(f"the gateway did not drain and end: {exit_text(child.poll() or 0)}")
    await world.restart("gateway")


@asynccontextmanager
async def corrupted(world: World, draw: random.Random, kind: str) -> AsyncIterator[None]:
    """Change the draft's messages by `CORRUPTIONS[kind]`."""
    relay = _there(world.relay, "relay")
    relay.corrupt(kind)
    try:
        yield
    finally:
        relay.corrupt("passed")


@asynccontextmanager
async def disguised(world: World, draw: random.Random, **fields: object) -> AsyncIterator[None]:
    """Change `fields` of the draft's hello, and begin its session anew."""
    relay = _there(world.relay, "relay")
    relay.disguise(**fields)
    try:
        yield
    finally:
        relay.disguise()


@asynccontextmanager
async def weathered(world: World, draw: random.Random, weather: Weather) -> AsyncIterator[None]:
    """Make the proxy between verify and draft a bad network."""
    proxy = _there(world.proxy, "proxy")
    proxy.weather = weather
    try:
        yield
    finally:
        proxy.weather = Weather()


@asynccontextmanager
async def disconnected(world: World, draw: random.Random) -> AsyncIterator[None]:
    """Reset all connections between verify and draft, again and again."""
    proxy = _there(world.proxy, "proxy")

    async def disconnect() -> None:
        while True:
            proxy.disconnect()
            await asyncio.sleep(2 * DISCONNECT_SECONDS * draw.random())

    async with _meanwhile(disconnect()):
        yield


@asynccontextmanager
async def aired(world: World, draw: random.Random, air: Air) -> AsyncIterator[None]:
    """Delay or lose packets between the namespaces of verify and draft."""
    link = _there(world.link, "link")
    link.air = air
    try:
        yield
    finally:
        link.air = Air()


@asynccontextmanager
async def full_disk(world: World, draw: random.Random) -> AsyncIterator[None]:
    """Fill the disk that logs go to. A device that is always full needs no more."""
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
    """Run `count` misbehaving clients beside the load."""
    async with _meanwhile(*(client(world, draw.randrange(2**32)) for _ in range(count))):
        yield


@asynccontextmanager
async def _meanwhile(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` while the context lasts. Its exceptions are raised at the end."""
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


LATE_AIR = Air(delay=0.05, jitter=0.02, loss=0.03)
LATE_WEATHER = Weather(delay=0.05, jitter=0.02, loss=0.03)
PLAIN_SPEED = "Tokens come at plain speed meanwhile."
UNNOTICED = "Nothing but a change of speed."

CASES: dict[str, ChaosCase] = {
    "draft_killed": ChaosCase(
        "SIGKILL of the draft", "plain", partial(killed, name="draft"), f"{PLAIN_SPEED} No stream ends or waits."
    ),
    "draft_stopped": ChaosCase(
        "SIGSTOP and SIGCONT of the draft",
        "plain",
        partial(stopped, name="draft"),
        "The same; verify gives the session up after two seconds without an answer.",
    ),
    "draft_restarted": ChaosCase(
        "restart of the draft",
        "plain",
        partial(restarted, name="draft"),
        "The same; the draft serves what it has open before it ends.",
        lasts=0.0,
    ),
    "draft_flapping": ChaosCase("draft killed whenever it is back", "plain", flapping, f"{PLAIN_SPEED}"),
    "client_vanishes": ChaosCase(
        "clients that reset their connection in mid-stream",
        "plain",
        partial(misused, client=lambda world, seed: vanishing(world.cluster.rest_url, seed), count=3),
        "Others share the machine with answers that are cancelled as soon as their client is gone.",
    ),
    "client_slow": ChaosCase(
        "clients that do not read",
        "plain",
        partial(misused, client=lambda world, seed: unread(world.cluster.rest_url), count=3),
        "Others share the machine with them, and do not wait for them.",
    ),
    "verify_killed": ChaosCase(
        "SIGKILL of verify",
        "plain",
        partial(killed, name="verify"),
        "Streams end with UNAVAILABLE; new requests get UNAVAILABLE or 503 with Retry-After until verify is back.",
        lasts=0.25,
        may_fail=True,
        may_refuse=True,
    ),
    "gateway_drained": ChaosCase(
        "SIGTERM of the gateway",
        "plain",
        drained,
        "Streams finish; new requests get UNAVAILABLE or 503 with Retry-After until a gateway is there.",
        lasts=0.25,
        may_refuse=True,
    ),
    "messages_lost": ChaosCase("a third of its messages lost", "relayed", partial(corrupted, kind="lost"), UNNOTICED),
    "messages_truncated": ChaosCase(
        "half of its messages cut short", "relayed", partial(corrupted, kind="truncated"), UNNOTICED
    ),
    "messages_duplicated": ChaosCase(
        "all messages two to four times", "relayed", partial(corrupted, kind="duplicated"), UNNOTICED
    ),
    "messages_reordered": ChaosCase(
        "messages in any order", "relayed", partial(corrupted, kind="reordered"), UNNOTICED
    ),
    "messages_stale": ChaosCase(
        "old messages among the new ones", "relayed", partial(corrupted, kind="stale"), UNNOTICED
    ),
    "messages_flipped": ChaosCase(
        "bits of every message flipped", "relayed", partial(corrupted, kind="flipped"), UNNOTICED
    ),
    "messages_garbage": ChaosCase(
        "noise, and trees of nonsense for real requests", "relayed", partial(corrupted, kind="garbage"), UNNOTICED
    ),
    "messages_hostile": ChaosCase("all of these at random", "relayed", partial(corrupted, kind="hostile"), UNNOTICED),
    "tokens_foreign": ChaosCase(
        "a drafter that guesses in another tokenizer's ids",
        "relayed",
        partial(corrupted, kind="foreign"),
        "Nothing is accepted, and soon nothing is verified.",
    ),
    "tokenizer_wrong": ChaosCase(
        "a drafter that says it has another tokenizer",
        "relayed",
        partial(disguised, token_ids_hash="0" * 64),
        f"{PLAIN_SPEED} Verify's log names both values; it asks again every 2 seconds.",
    ),
    "vocabulary_wrong": ChaosCase(
        "a drafter of a vocabulary of 97 tokens",
        "relayed",
        partial(disguised, vocab_size=97),
        f"{PLAIN_SPEED} What is guessed past the smaller vocabulary is dropped.",
    ),
    "network_late": ChaosCase("50 to 70 ms and 3 % loss each way", "linked", partial(aired, air=LATE_AIR), UNNOTICED),
    "network_parted": ChaosCase("no packet passes", "linked", partial(aired, air=Air(loss=1.0)), PLAIN_SPEED),
    "proxy_late": ChaosCase(
        "the same delay and loss by a proxy", "proxied", partial(weathered, weather=LATE_WEATHER), UNNOTICED
    ),
    "proxy_thin": ChaosCase("8 KB/s", "proxied", partial(weathered, weather=Weather(rate=8192)), UNNOTICED),
    "proxy_cut": ChaosCase(
        "connections that end in mid-frame", "proxied", partial(weathered, weather=Weather(cut=0.02)), UNNOTICED
    ),
    "proxy_reset": ChaosCase("connections reset about every 0.7 s", "proxied", disconnected, UNNOTICED),
    "logs_full": ChaosCase(
        "a full disk below the logs of all services", "logged", full_disk, "Nothing; lines are missing from the logs."
    ),
}
