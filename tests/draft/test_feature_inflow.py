"""Features are held within bounds and released in their order."""

from __future__ import annotations

import asyncio
import random

import pytest

from draft_service.door import features
from draft_service.door.features import FeatureInflow


async def admit(inflow: FeatureInflow, sequence: int, num_bytes: int) -> bool:
    """Admit a message of one piece."""
    (admitted,) = await inflow.admit([(sequence, num_bytes)])
    return admitted


async def test_messages_are_released_in_order_whatever_order_the_engine_takes() -> None:
    inflow = FeatureInflow()
    for sequence in range(1, 5):
        assert await admit(inflow, sequence, 10)
    inflow.release(3)
    inflow.release(2)
    inflow.release(1)
    assert await inflow.next_release() == 3
    inflow.release(4)
    assert await inflow.next_release() == 4


async def test_what_is_not_done_is_not_released() -> None:
    inflow = FeatureInflow()
    for sequence in (1, 2):
        assert await admit(inflow, sequence, 10)
    inflow.release(2)
    waiting = asyncio.create_task(inflow.next_release())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    inflow.release(1)
    assert await asyncio.wait_for(waiting, 10) == 2


async def test_a_number_that_does_not_rise_is_refused_and_one_may_be_missing() -> None:
    inflow = FeatureInflow()
    assert not await admit(inflow, 0, 1)
    assert await admit(inflow, 2, 1)
    assert not await admit(inflow, 2, 1)
    assert not await admit(inflow, 1, 1)
    assert await admit(inflow, 7, 1)
    inflow.release(2)
    inflow.release(7)
    assert await inflow.next_release() == 7


async def test_the_reader_waits_while_too_much_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MAX_HELD_BYTES", 100)
    inflow = FeatureInflow()
    assert await admit(inflow, 1, 60) and await admit(inflow, 2, 60)
    third = asyncio.create_task(admit(inflow, 3, 60))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not third.done()
    inflow.release(1)
    assert await asyncio.wait_for(third, 10)


async def test_what_was_handed_over_is_released_message_by_message() -> None:
    inflow = FeatureInflow()
    await inflow.admit([(1, 10), (2, 10)])
    await admit(inflow, 3, 10)
    inflow.hand_over([1, 2])
    inflow.hand_over([3])
    inflow.taken()
    assert await inflow.next_release() == 2
    inflow.taken()
    assert await inflow.next_release() == 3


async def test_releases_in_any_order_all_arrive() -> None:
    inflow = FeatureInflow()
    order = list(range(1, 201))
    for sequence in order:
        assert await admit(inflow, sequence, 1)
    random.Random(3).shuffle(order)
    last = 0
    for sequence in order:
        inflow.release(sequence)
        if min(order[order.index(sequence) + 1 :], default=201) > last + 1:
            told = await asyncio.wait_for(inflow.next_release(), 10)
            assert told > last
            last = told
    assert last == 200
