"""Door and engine as two processes: a start that fails, an end from either side, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
from draft_door import Stream
from draft_fakes import open_message
from service_process import engine_of, is_gone, start_door, wait_until

from draft_service import main
from outrider.config.draft import DraftOptions
from outrider.errors import ConfigError, InternalError
from outrider.host.process import KERNEL_CACHES
from outrider.protocol.speculation import Close, Decline, DeclineReason, Grow, Hello
from outrider.rpc.channel import open_channel

NGRAM = DraftOptions(speculative_algorithm=("NGRAM",), metrics_address="")


def options_at(folder: Path, **fields: object) -> DraftOptions:
    options = {"address": f"unix:{folder}/d", "ready_file": str(folder / "ready")} | fields
    return DraftOptions(speculative_algorithm=("NGRAM",), metrics_address="", **options)  # type: ignore[arg-type]


async def decline_or_none(stream: Stream) -> Decline | None:
    """The next message, if it is one."""
    message = await stream.receive()
    return message if isinstance(message, Decline) else None


async def test_an_engine_serves_until_it_is_stopped() -> None:
    process, engine, _ = await main.start_engine(NGRAM)
    try:
        profile = await process.ready(asyncio.Event())
        assert profile is not None and profile.hello.sources == ("ngram", "ngram_shared")
        assert not profile.maps_memory and "shared_trie_nodes" in profile.gauges
        environment = psutil.Process(process._process.pid).environ()
        assert KERNEL_CACHES.items() <= environment.items(), "kernels of old shapes would gather"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert (await engine.ask()).num_requests == 0
        num_signs = engine.num_signs
        assert engine.expects_sign()
        await engine.ask()
        assert engine.num_signs == num_signs + 2, "one that has nothing to do answers"
        await process.stop()
        assert engine.gone
    finally:
        await process.close()
    assert process._process.returncode == 0


async def test_options_that_cannot_be_met_come_back_as_one_line() -> None:
    process, *_ = await main.start_engine(DraftOptions(speculative_algorithm=("NOBODY",)))
    try:
        with pytest.raises(ConfigError, match="NOBODY"):
            await process.ready(asyncio.Event())
    finally:
        await process.close()


async def test_an_engine_that_dies_at_its_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "ENGINE_MODULE", "no_such_module")
    process, *_ = await main.start_engine(NGRAM)
    try:
        with pytest.raises(InternalError, match="exit code 1"):
            await process.ready(asyncio.Event())
    finally:
        await process.close()


async def test_an_engine_that_is_told_nonsense_ends_and_the_door_hears_of_it() -> None:
    process, engine, _ = await main.start_engine(NGRAM)
    try:
        await process.ready(asyncio.Event())
        assert engine._transport is not None
        engine._transport.write(b"\x03\x00\x00\x00\xff\xff\xff")
        await asyncio.wait_for(engine.lost(), 20)
        assert not engine.alive
        await asyncio.wait_for(engine.drain(), 1)
    finally:
        await process.close()
    assert process._process.returncode == 1


async def test_the_streams_of_a_killed_engine_end_and_the_service_exits_with_1(tmp_path: Path) -> None:
    options = options_at(tmp_path)
    with start_door("draft_service", options) as door:
        wait_until(Path(options.ready_file).exists)
        async with open_channel(options.address) as channel:
            stream = Stream(channel)
            assert isinstance(await stream.hello(), Hello)
            await stream.send(open_message([1, 2, 1, 2, 1]))
            assert isinstance(await stream.receive(), Grow)
            engine_of(door).kill()
            async with asyncio.timeout(20):
                assert await stream.ended() is not grpc.StatusCode.OK
        _, words = await asyncio.to_thread(door.communicate, None, 30)
    assert door.returncode == 1 and "ERROR" in words and "killed by signal 9" in words
    assert not Path(options.ready_file).exists()


async def test_an_engine_that_stands_still_is_killed_and_the_service_exits_with_1(tmp_path: Path) -> None:
    options = options_at(tmp_path, watchdog_timeout=0.4)
    with start_door("draft_service", options) as door:
        wait_until(Path(options.ready_file).exists)
        engine_of(door).suspend()
        _, words = await asyncio.to_thread(door.communicate, None, 30)
    assert door.returncode == 1
    (line,) = [line for line in words.splitlines() if "ERROR" in line]
    assert "the engine has not answered for 0.4 s (--watchdog-timeout) with 0 requests; the engine is killed" in line


def test_an_engine_outlives_its_door_in_no_case(tmp_path: Path) -> None:
    options = options_at(tmp_path)
    with start_door("draft_service", options) as door:
        wait_until(Path(options.ready_file).exists)
        engine = engine_of(door)
        door.kill()
        wait_until(lambda: is_gone(engine))


def test_one_interrupt_of_the_terminal_ends_both(tmp_path: Path) -> None:
    options = options_at(tmp_path)
    with start_door("draft_service", options) as door:
        wait_until(Path(options.ready_file).exists)
        engine = engine_of(door)
        os.killpg(door.pid, signal.SIGINT)
        _, words = door.communicate(timeout=30)
    assert door.returncode == 0 and is_gone(engine)
    assert "Traceback" not in words and "KeyboardInterrupt" not in words and words.count("SIGINT: stopping") == 1


async def test_a_service_that_drains_serves_what_is_open_and_then_ends_with_0(tmp_path: Path) -> None:
    options = options_at(tmp_path, drain_seconds=30.0)
    with start_door("draft_service", options) as door:
        wait_until(Path(options.ready_file).exists)
        engine = engine_of(door)
        async with open_channel(options.address) as channel:
            stream = Stream(channel)
            await stream.hello()
            await stream.send(open_message([1, 2, 1, 2, 1]))
            assert await stream.receive()  # it is open: before that a drain would have nothing to wait for
            door.terminate()
            request, message = 1, None
            async with asyncio.timeout(20):
                while message is None:
                    request += 1
                    await stream.send(open_message([1, 2, 1, 2, 1], request=request))
                    message = await decline_or_none(stream)
                    await stream.send(Close(request))
            assert message.reason is DeclineReason.DRAINING
            assert door.poll() is None and engine.is_running()
            with suppress(grpc.aio.AioRpcError):  # the end of the service may overtake the write
                await stream.send(Close(1))
        _, words = await asyncio.to_thread(door.communicate, None, 30)
    assert door.returncode == 0 and is_gone(engine) and "Traceback" not in words


def test_what_an_engine_refuses_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    options = DraftOptions(address=f"unix:{tmp_path}/d", metrics_address="", speculative_algorithm=("NOBODY",))
    with start_door("draft_service", options) as door:
        _, words = door.communicate(timeout=60)
    assert door.returncode == 2
    assert words.count("\n") == 1 and words.startswith("draft: error: ") and "NOBODY" in words
