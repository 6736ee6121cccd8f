"""Names in lists of addresses stand for what is behind them now."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import aclosing

import pytest
from names_shown import Names

from outrider.errors import ConfigError
from outrider.rpc.peers import PeerAddresses, look_up


def peers(names: Names, *given: str) -> PeerAddresses:
    return names.of(given, "--verify")


async def followed(names: Names, addresses: PeerAddresses, num_looks: int) -> list[tuple[str, ...]]:
    """What a follower receives in so many looks."""
    received: list[tuple[str, ...]] = []

    async def follow() -> None:
        async with aclosing(addresses.follow()) as changes:  # type: ignore[type-var]
            async for change in changes:
                received.append(change)

    task = asyncio.create_task(follow())
    for _ in range(num_looks):
        await names.next()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return received


async def test_plain_addresses_are_told_once_and_nothing_is_looked_up() -> None:
    names = Names()
    addresses = peers(names, "127.0.0.1:1", "unix:/s", "127.0.0.1:1")
    assert [change async for change in addresses.follow()] == [("127.0.0.1:1", "unix:/s")] == [addresses.now]
    assert not names.asked and addresses
    assert not peers(names) and [change async for change in peers(names).follow()] == []


@pytest.mark.parametrize("name", ["dns:///verify-headless:50052", "dns:verify-headless:50052"])
async def test_a_name_stands_for_all_its_addresses_and_changes_with_them(name: str) -> None:
    names = Names(["10.0.0.2:1", "10.0.0.1:1"], ["10.0.0.1:1", "10.0.0.2:1"], ["10.0.0.3:1", "10.0.0.2:1"])
    received = await followed(names, peers(names, name), 3)
    assert received == [("10.0.0.1:1", "10.0.0.2:1"), ("10.0.0.2:1", "10.0.0.3:1")], "another order is no change"
    assert names.asked[0] == ("verify-headless", 50052)


async def test_fixed_addresses_are_told_before_the_first_look_and_stay_beside_a_name() -> None:
    names = Names(["10.0.0.1:1", "127.0.0.1:1"])
    received = await followed(names, peers(names, "127.0.0.1:1", "dns:///verify:1"), 1)
    assert received == [("127.0.0.1:1",), ("127.0.0.1:1", "10.0.0.1:1")], "one that is there twice counts once"


@pytest.mark.parametrize(
    "trouble", [[], socket.gaierror(socket.EAI_NONAME, "unknown"), OSError("no network"), UnicodeError("too long")]
)
async def test_an_empty_answer_or_an_error_keeps_the_last_good_list(
    trouble: list[str] | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    names = Names(["10.0.0.1:1"], trouble, trouble, ["10.0.0.2:1"])
    addresses = peers(names, "dns:///verify:1")
    assert await followed(names, addresses, 3) == [("10.0.0.1:1",)] == [addresses.now]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "kept: 1 address of before" in warnings[0].getMessage()


async def test_a_name_without_addresses_at_the_start_is_waited_for() -> None:
    names = Names(socket.gaierror(socket.EAI_NONAME, "unknown"), [], ["10.0.0.1:1"])
    assert await followed(names, peers(names, "dns:///verify:1"), 3) == [("10.0.0.1:1",)]


async def test_the_system_s_resolver_is_asked() -> None:
    assert await look_up("127.0.0.1", 7) == {"127.0.0.1:7"}
    assert await look_up("::1", 7) == {"[::1]:7"}
    with pytest.raises(OSError):
        await look_up("no-such-name.invalid", 7)
    with pytest.raises(UnicodeError):
        await look_up("x" * 70, 7)


@pytest.mark.parametrize("answer", [[(socket.AF_INET, 0, 0, "", ("10.0.0.1", 7))], OSError("no network")])
async def test_a_look_up_that_nobody_waits_for_any_more_ends_quietly(
    answer: list[object] | OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered, failures = threading.Event(), threading.Event(), list[object]()

    def getaddrinfo(*question: object, **kind: object) -> object:
        asked.set()
        answered.wait()
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(threading, "excepthook", failures.append)
    looking = asyncio.create_task(look_up("verify", 7))
    await asyncio.to_thread(asked.wait)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "look up verify")
    answered.set()
    await asyncio.to_thread(thread.join)
    assert not failures


@pytest.mark.parametrize(
    "bad", ["dns://8.8.8.8/verify:1", "dns:///verify", "dns://verify:1", "http://verify:1", "dns:"]
)
def test_what_is_no_address_is_refused_under_the_option_s_name(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"--verify: "):
        PeerAddresses([bad], "--verify", seconds=5)
