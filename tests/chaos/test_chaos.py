"""Whatever befalls the services under load: no token is wrong, nothing leaks, and speculation comes back by itself."""

from __future__ import annotations

import asyncio
import random

import pytest
from tiny_service import metric

from benchmarks.chaos.cases import CASES, ChaosCase, stopped
from benchmarks.chaos.link import Link
from benchmarks.chaos.load import ChaosLoad, KnownAnswer
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.relay import Relay
from benchmarks.chaos.worlds import World
from benchmarks.serving.soak import settle

CLIENTS = 4
QUICK = {
    "draft_flapping",
    "gateway_drained",
    "messages_hostile",
    "proxy_cut",
}


def parameters() -> list[object]:
    made = []
    for name, case in CASES.items():
        marks = [] if name in QUICK else [pytest.mark.slow]
        if case.world == "linked":
            marks.append(pytest.mark.skipif("not Link.possible()", reason="needs Linux, root and /dev/net/tun"))
        # What needs nothing between the services takes the world that is open anyway, whose proxy does no harm then.
        kind = "proxied" if name in QUICK and case.world == "plain" else case.world
        made.append(pytest.param(kind, name, id=name, marks=marks))
    return sorted(made, key=lambda param: param.values[0] != "proxied")


async def trouble(load: ChaosLoad, world: World, case: ChaosCase, befallen: int) -> None:
    """Wait until the fault has shown itself, and the load has gone on in spite of it."""
    if case.may_refuse:
        await load.until(lambda: load.record.failed or load.record.refused)
    else:
        await load.answers(6)
    if case.world != "plain" and tool(world) is not None:
        await load.until(lambda: num_befallen(world) > befallen)


def tool(world: World) -> Relay | Proxy | Link | None:
    """What does the harm in a world, if it is not done to its processes."""
    return world.relay or world.proxy or world.link


def num_befallen(world: World) -> int:
    """Messages, connections and packets that faults have harmed so far."""
    harmful = tool(world)
    return harmful.num_harmed if harmful is not None else 0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("world", ["proxied"], indirect=True)
async def test_a_stopped_draft_is_given_up_among_requests_that_are_shorter_than_the_wait_for_it(
    world: World, known: list[KnownAnswer]
) -> None:
    page = world.cluster.metrics_url("verify")

    async def num_peers() -> float:
        return await asyncio.to_thread(metric, page, "outrider_verify_draft_connected")

    async with ChaosLoad(world.cluster.gateway_address, known, CLIENTS) as load, asyncio.timeout(30):
        await load.accepted()
        async with stopped(world, random.Random(), "draft"):
            while await num_peers():
                await load.answers(1)
        await load.accepted()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("world", ["proxied"], indirect=True)
async def test_the_load_counts_tokens_that_are_not_the_expected_ones(world: World, known: list[KnownAnswer]) -> None:
    first = known[0]
    other = (first.token_ids[0] + 1) % 61
    spoilt = KnownAnswer(first.request, (*first.token_ids[:5], other, *first.token_ids[5:]), first.text)
    async with ChaosLoad(world.cluster.gateway_address, [spoilt], 1) as load:
        await load.answers(1)
    assert load.record.wrong > 1
    short = KnownAnswer(first.request, first.token_ids[:-1], first.text + "x")
    async with ChaosLoad(world.cluster.gateway_address, [short], 1) as load:
        await load.answers(1)
    assert load.record.wrong and load.record.wrong_texts


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("world", "name"), parameters(), indirect=["world"])
async def test_no_token_is_wrong_nothing_leaks_and_drafts_are_accepted_again(
    world: World, name: str, known: list[KnownAnswer]
) -> None:
    case, befallen = CASES[name], num_befallen(world)
    async with ChaosLoad(world.cluster.gateway_address, known, CLIENTS) as load:
        await load.answers(2)
        await load.accepted()
        async with case.fault(world, random.Random(name)):
            await trouble(load, world, case, befallen)
        await load.accepted()
        await load.answers(2)
    record = load.record
    assert not record.wrong and not record.wrong_texts
    assert case.may_fail or not record.failed, record.errors
    assert case.may_fail or case.may_refuse or not record.refused, record.errors
    left = await asyncio.to_thread(settle, world.cluster)
    assert not any(left.gauges.values()), left.gauges
    assert world.num_alive == 3
