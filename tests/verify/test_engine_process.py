"""Door and engine as two processes: a start that fails, an end from either side, and no process left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from harness import tiny_model
from service_process import engine_of, is_gone, start_door, wait_until
from threaded_engine import ThreadInbox
from tokenizers import Tokenizer, models

from outrider.config.base import options_to_argv
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, InternalError
from outrider.host.process import KERNEL_CACHES
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.rpc.channel import open_channel
from outrider.sampling.params import SamplingParams
from outrider.v1 import verify_pb2, verify_pb2_grpc
from verify_service import main
from verify_service.door.remote import RemoteVerifyEngine
from verify_service.engine.build import assemble
from verify_service.frames import RoundReport


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder)
    words = {f"word{number}": number for number in range(61)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return folder


def options_for(model: str | Path, **fields: str) -> VerifyOptions:
    return VerifyOptions(
        model=str(model), dtype="float32", threads=1, max_total_tokens=1024, metrics_address="", draft=(), **fields
    )


def drafting_options(folder: Path, draft: Path, *names: str) -> VerifyOptions:
    options = options_for(folder, device="cpu", speculative_draft_model_path=str(draft))
    return replace(options, speculative_algorithm=names)


@pytest.fixture
def collected() -> Iterator[None]:
    """An engine in the test's process turns off what other tests count on."""
    yield
    gc.enable()


async def test_an_engine_serves_until_it_is_stopped(folder: Path) -> None:
    rounds: list[RoundReport] = []
    process, engine = await main.start_engine(options_for(folder), rounds.append)
    try:
        ready = await process.ready(asyncio.Event())
        assert ready is not None
        info = ready.info
        assert (info.vocab_size, info.context_length) == (61, 256)
        assert info.eos_token_ids == (60,) and info.dtype == "float32" and info.model_path == str(folder)
        environment = psutil.Process(process._process.pid).environ()
        assert KERNEL_CACHES.items() <= environment.items(), "kernels of old shapes would gather"
        updates: asyncio.Queue[GenerationUpdate] = asyncio.Queue()
        greedy = SamplingParams(temperature=0.0)
        engine.submit(GenerationRequest("r", [1, 2], greedy, 8, disable_speculation=True), updates.put_nowait)
        count = 0
        while True:
            update = await asyncio.wait_for(updates.get(), 20)
            count += len(update.token_ids)
            if update.last:
                break
        assert count == 8
        await process.stop()
        assert engine.gone
    finally:
        await process.close()
    assert process._process.returncode == 0


async def test_n_grams_draft_alone_where_the_model_beside_them_cannot(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = drafting_options(folder, tmp_path / "none", "STANDALONE", "NGRAM")
    process, _ = await main.start_engine(options, lambda report: None)
    try:
        served = await process.ready(asyncio.Event())
        assert served is not None and served.drafters == ("NGRAM",)
        await process.stop()
    finally:
        await process.close()
    stderr = capfd.readouterr().err
    assert f"only n-grams draft, {tmp_path}/none is not used: " in stderr
    assert "NGRAM draft in this process" in stderr


@pytest.mark.parametrize("names", [("STANDALONE", "NGRAM"), ("AUTO",)])
def test_n_grams_draft_alone_where_the_model_beside_them_has_another_tokenizer(
    names: tuple[str, ...], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, collected: None
) -> None:
    """As in a draft service."""
    tiny_model(tmp_path)
    words = {f"other{number}": number for number in range(61)}
    Tokenizer(models.WordLevel(words, unk_token="other0")).save(str(tmp_path / "tokenizer.json"))
    caplog.set_level(logging.INFO)
    _, served = assemble(drafting_options(folder, tmp_path, *names), ThreadInbox(), lambda report: None)
    assert served.drafters == ("NGRAM",)
    assert f"only n-grams draft, {tmp_path} is not used: " in caplog.text
    assert "NGRAM draft in this process" in caplog.text


def test_a_model_that_alone_would_draft_and_cannot_ends_the_start(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ConfigError, match="none"):
        assemble(drafting_options(folder, tmp_path / "none", "STANDALONE"), ThreadInbox(), lambda report: None)
    assert "draft in this process" not in caplog.text and "only n-grams draft" not in caplog.text


async def test_an_engine_that_dies_at_its_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "ENGINE_MODULE", "no_such_module")
    process, _ = await main.start_engine(VerifyOptions(), lambda report: None)
    try:
        with pytest.raises(InternalError, match="exit code 1"):
            await process.ready(asyncio.Event())
    finally:
        await process.close()


async def test_a_folder_without_a_tokenizer_is_refused_before_the_engine_is_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "ENGINE_MODULE", "no_such_module")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    options = options_for(tmp_path, address=f"unix:{tmp_path}/v")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=rf"^--model: {tmp_path} has no tokenizer\.json; save the tokenizer once with"
    ):
        await main.serve(options, asyncio.Event())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=rf"^--model: {tmp_path}/tokenizer\.json is not a tokenizer: .*; save it again"
    ):
        await main.serve(options, asyncio.Event())


async def test_an_engine_that_the_door_kills_did_not_end_by_itself(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process, _ = await main.start_engine(options_for(folder), lambda report: None)
    try:
        await process.ready(asyncio.Event())
    finally:
        await process.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_service_ends_with_1_when_its_engine_is_killed(folder: Path, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    with start_door(
        "verify_service", options_for(folder, address=f"unix:{tmp_path}/v", ready_file=str(ready_file))
    ) as door:
        wait_until(ready_file.exists)
        engine_of(door).kill()
        _, words = door.communicate(timeout=30)
    assert door.returncode == 1
    (line,) = [line for line in words.splitlines() if "ERROR" in line]
    assert "the engine process ended by itself (killed by signal 9, out of memory perhaps)" in line
    assert not ready_file.exists()


async def test_an_engine_that_stands_still_is_killed_and_who_waits_is_told(folder: Path, tmp_path: Path) -> None:
    options = options_for(folder, address=f"unix:{tmp_path}/v", ready_file=str(tmp_path / "ready"))
    with start_door("verify_service", replace(options, watchdog_timeout=0.4)) as door:
        await asyncio.to_thread(wait_until, (tmp_path / "ready").exists)
        engine_of(door).suspend()
        request = verify_pb2.VerifyServiceGenerateRequest(request_id="r", prompt_token_ids=[1, 2], max_tokens=8)
        try:
            async with open_channel(options.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="the verify engine failed"):
                    await verify_pb2_grpc.VerifyServiceStub(channel).Generate(request).read()
        except BaseException:
            door.kill()
            raise
        _, words = await asyncio.to_thread(door.communicate, timeout=30)
    assert door.returncode == 1
    (line,) = [line for line in words.splitlines() if "ERROR" in line]
    assert "no round has ended for 0.4 s (--watchdog-timeout) with 1 request; the engine is killed" in line


async def test_an_engine_without_requests_does_not_stand_still() -> None:
    engine = RemoteVerifyEngine(lambda report: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.stands_still(0.02), 0.3)
    engine.alive = True
    engine.backlog.open(1, 0)
    engine.submit(GenerationRequest("r", [1, 2], SamplingParams(), 8), lambda update: None)
    await asyncio.wait_for(engine.stands_still(0.02), 30)


def test_one_interrupt_of_the_terminal_ends_both(folder: Path, tmp_path: Path) -> None:
    """While the model is loaded; a service that is ready ends so, too, and by the same code as a draft service's."""
    with start_door("verify_service", options_for(folder, address=f"unix:{tmp_path}/v")) as door:
        engine = engine_of(door)
        os.killpg(door.pid, signal.SIGINT)
        _, words = door.communicate(timeout=30)
    assert door.returncode == 0 and is_gone(engine)
    assert "Traceback" not in words and "KeyboardInterrupt" not in words and words.count("SIGINT: stopping") == 1


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(folder: Path, tmp_path: Path) -> None:
    with start_door("verify_service", options_for(tmp_path / "nowhere", address=f"unix:{tmp_path}/v")) as door:
        _, words = door.communicate(timeout=60)
    assert door.returncode == 2
    assert words.count("\n") == 1 and words.startswith("verify: error: ") and "nowhere" in words


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
async def test_a_service_whose_input_and_outputs_are_closed_serves(folder: Path, tmp_path: Path, closed: str) -> None:
    ready = tmp_path / "ready"
    options = options_for(folder, address=f"unix:{tmp_path}/s", ready_file=str(ready))
    door = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "verify_service", *options_to_argv(options)]
    )
    try:
        wait_until(lambda: ready.exists() or door.poll() is not None)
        assert ready.exists()
    finally:
        door.terminate()
    assert door.wait(20) == 0
