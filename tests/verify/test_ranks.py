"""Ranks on a CPU give the text of one: with trees, full memory, prefixes and features; faults end the service."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cuda_harness import VOCAB, jobs, small_model, texts
from feature_draft import FeatureDraft
from harness import Answer, make_engine, run_all, tokens
from local_draft import LocalDraft, noise, oracle
from rank_threads import ranked
from service_process import is_gone, wait_until
from threaded_engine import ThreadedEngine
from tokenizers import Tokenizer, models

from outrider.config.base import parse_options
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, InternalError
from outrider.models.base import LanguageModel
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_decoder
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.sampling.params import SamplingParams
from verify_service import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    small_model(folder)
    words = {f"word{number}": number for number in range(61)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_decoder(folder)


@pytest.fixture(params=[2, 4])
def two(folder: Path, request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    with ranked(folder, request.param) as model:
        yield model


@pytest.mark.parametrize("num_pages", [256, 24])
@pytest.mark.parametrize("name", ["none", "oracle", "random"])
def test_the_text_is_that_of_one_rank(
    two: CausalLM, truth: list[Answer], engines: list[ThreadedEngine], name: str, num_pages: int
) -> None:
    engine = make_engine(two, num_pages, chunk_size=16)
    engines.append(engine)
    if name != "none":
        guess = oracle(texts(truth), VOCAB) if name == "oracle" else noise(9, VOCAB)
        engine.draft_connected(LocalDraft(engine, VOCAB, guess))
    engine.start()
    answers = run_all(engine, jobs(), 4)
    engine.stop()
    assert tokens(answers) == tokens(truth)
    if name == "oracle":
        assert sum(answer.num_accepted for answer in answers) > 100
    if num_pages == 24:
        assert engine.scheduler.num_preemptions > 0
    else:
        assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)


def test_features_come_from_rank_0(
    two: CausalLM, model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine]
) -> None:
    engine = make_engine(two, chunk_size=16)
    engines.append(engine)
    draft = FeatureDraft(engine, VOCAB, oracle(texts(truth), VOCAB), (0, 1, 3))
    draft.connect()
    engine.start()
    answers = run_all(engine, jobs(), 4)
    engine.stop()
    assert tokens(answers) == tokens(truth)
    assert draft.check(model) > 200


def options_for(folder: Path, **fields: object) -> VerifyOptions:
    values: dict[str, object] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 1024}
    values |= {"metrics_address": "", "draft": (), "tensor_parallel_size": 2}
    return VerifyOptions(model=str(folder), **values | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [None, signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_ends_or_hangs_ends_the_engine_with_its_name(
    folder: Path, fault: signal.Signals | None
) -> None:
    seconds = 2.0 if fault == signal.SIGSTOP else 60.0
    process, engine = await main.start_engine(options_for(folder, rank_seconds=seconds), lambda report: None)
    try:
        assert await process.ready(asyncio.Event()) is not None
        (rank,) = psutil.Process(process._process.pid).children()
        updates: asyncio.Queue[GenerationUpdate] = asyncio.Queue()
        asked = GenerationRequest("r", [1, 2], SamplingParams(temperature=0.0), 200, disable_speculation=True)
        engine.submit(asked, updates.put_nowait)
        first = await asyncio.wait_for(updates.get(), 20)
        assert first.token_ids
        if fault is not None:
            rank.send_signal(fault)
        last = first
        while not last.last:
            last = await asyncio.wait_for(updates.get(), 20)
        if fault is None:
            assert last.error is None
            await process.stop()
        else:
            assert isinstance(last.error, InternalError)
            assert "rank 1 of 2" in last.error.message
            await asyncio.wait_for(engine.lost(), 20)
    finally:
        await process.close()
    assert process._process.returncode == (0 if fault is None else 1)
    wait_until(lambda: is_gone(rank))


async def test_a_rank_that_ends_while_nothing_is_asked_ends_the_engine(folder: Path) -> None:
    process, engine = await main.start_engine(options_for(folder), lambda report: None)
    try:
        assert await process.ready(asyncio.Event()) is not None
        (rank,) = psutil.Process(process._process.pid).children()
        rank.kill()
        await asyncio.wait_for(engine.lost(), 20)
    finally:
        await process.close()
    assert process._process.returncode == 1


async def test_a_model_that_cannot_be_divided_is_refused_at_the_start(folder: Path) -> None:
    process, _ = await main.start_engine(options_for(folder, tensor_parallel_size=3), lambda report: None)
    try:
        with pytest.raises(ConfigError, match="num_attention_heads 4 cannot be divided among 3 ranks"):
            await process.ready(asyncio.Event())
    finally:
        await process.close()


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tp-size", "--tp", "-tp"])
def test_the_option_has_the_names_of_other_engines(flag: str) -> None:
    assert parse_options(VerifyOptions, [flag, "4"]).tensor_parallel_size == 4
