"""What the engine answers a stream waits in a bounded queue."""

from __future__ import annotations

import asyncio

import pytest

from draft_service.door.remote import VerifySession
from outrider.errors import OverloadedError
from outrider.protocol.speculation import Decline, DeclineReason


def decline(number: int) -> Decline:
    return Decline(number, DeclineReason.GAP, True)


async def test_answers_come_in_order() -> None:
    session = VerifySession(max_queued=100)
    waiting = asyncio.create_task(session.next_answers())
    session.send([decline(1)])
    session.send([decline(2)])
    assert [message.request for message in await waiting if isinstance(message, Decline)] == [1, 2]
    session.send([decline(3)])
    assert await session.next_answers() == [decline(3)]


async def test_answers_to_many_requests_at_once_are_no_overflow() -> None:
    session = VerifySession(max_queued=16)
    for _ in range(3):
        session.send([decline(number) for number in range(100)])
        assert len(await session.next_answers()) == 100


async def test_an_overflow_ends_the_session_and_holds_nothing() -> None:
    session = VerifySession(max_queued=16)
    session.send([decline(number) for number in range(17)])
    session.send([decline(17)])
    with pytest.raises(OverloadedError, match="16") as caught:
        await session.over()
    assert caught.value.code == "slow_reader"
    session.send([decline(number) for number in range(17)])
    assert await session.next_answers() == []


async def test_a_closed_session_takes_no_answers() -> None:
    session = VerifySession(max_queued=16)
    session.end()
    session.send([decline(1)])
    waiting = asyncio.create_task(session.next_answers())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
