"""Two ranks on two GPUs give the text of one, by either exchange, with trees and prefixes; and a dead rank is named."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from cuda_harness import jobs, save_random_head, small_model
from service_process import is_gone, wait_until
from tokenizers import Tokenizer, models

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, UnavailableError
from outrider.models.drafters.loader import is_cut
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from verify_service.frames import RoundReport
from verify_service.main import start_engine

pytestmark = pytest.mark.multi_gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
Texts = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    small_model(folder, head_dim=64, **SIZES)
    words = {f"word{number}": number for number in range(61)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return folder


def options_for(folder: Path, world: int, exchange: str = "auto", **fields: object) -> VerifyOptions:
    values: dict[str, object] = {"device": "cuda:0", "dtype": "float32", "max_total_tokens": 2048, "draft": ()}
    values |= {"max_running_requests": 4, "max_draft_tokens": 12, "chunked_prefill_size": 16, "metrics_address": ""}
    values |= {"tensor_parallel_size": world, "rank_exchange": exchange}
    return VerifyOptions(model=str(folder), **values | fields)  # type: ignore[arg-type]


def _put(queue: asyncio.Queue[tuple[int, GenerationUpdate]], number: int, update: GenerationUpdate) -> None:
    queue.put_nowait((number, update))


async def ask(options: VerifyOptions, speculate: bool = False, at_once: int = 4) -> tuple[Texts, list[RoundReport]]:
    """Answers to the jobs, so many at a time, and how rounds went."""
    reports: list[RoundReport] = []
    process, engine = await start_engine(options, reports.append)
    texts: Texts = [[] for _ in jobs()]
    try:
        assert await process.ready(asyncio.Event()) is not None
        for first in range(0, len(texts), at_once):
            queue: asyncio.Queue[tuple[int, GenerationUpdate]] = asyncio.Queue()
            group = range(first, min(first + at_once, len(texts)))
            for number in group:
                prompt, params = jobs()[number]
                # Those that want to know of their prompts take no prefix from the cache.
                wanted = 1 if number % 2 else None
                asked = GenerationRequest(
                    "r", prompt, params, 24, disable_speculation=not speculate, num_prompt_logprobs=wanted
                )
                engine.submit(asked, partial(_put, queue, number))
            left = len(group)
            while left:
                number, update = await asyncio.wait_for(queue.get(), 60)
                assert update.error is None, update.error
                texts[number] += update.token_ids
                left -= update.last
        await process.stop()
    finally:
        await process.close()
    return texts, reports


@pytest.fixture(scope="module")
def truth(folder: Path) -> Texts:
    return asyncio.run(ask(options_for(folder, 1)))[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("exchange", ["peer", "nccl"])
def test_two_ranks_give_the_text_of_one(folder: Path, truth: Texts, exchange: str, deterministic: bool) -> None:
    found, _ = asyncio.run(ask(options_for(folder, 2, exchange, deterministic=deterministic)))
    assert found == truth


def test_trees_grow_inside_the_rounds_of_ranks(folder: Path, truth: Texts) -> None:
    options = options_for(folder, 2, speculative_algorithm=("STANDALONE",), speculative_draft_model_path=str(folder))
    found, reports = asyncio.run(ask(options, speculate=True))
    assert found == truth
    assert sum(report.num_grown_accepted for report in reports) > 20


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head that is large enough to be cut: it knows little, and what it says hangs on features."""
    folder = tmp_path_factory.mktemp("head")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    save_random_head(folder, SIZES | heads | {"intermediate_size": 65536, "draft_vocab_size": 40})
    return folder


def drafting(folder: Path, head: Path, world: int, **fields: object) -> VerifyOptions:
    """Always three levels, so that growth does not hang on times."""
    fields |= {"speculative_algorithm": ("EAGLE3",), "speculative_draft_model_path": str(head)}
    return options_for(folder, world, lockstep=True, speculative_num_steps=3, **fields)


@pytest.mark.timeout(400)  # two engines compile and capture
def test_a_cut_head_grows_the_trees_of_a_whole_one(folder: Path, head: Path, truth: Texts) -> None:
    assert is_cut(drafting(folder, head, 2).draft_model(str(folder)), 2, torch.float32)
    accepted = []
    for world in (1, 2):
        # One at a time, so that what a request's tree may have does not hang on the others.
        found, reports = asyncio.run(ask(drafting(folder, head, world), speculate=True, at_once=1))
        assert found == truth
        accepted.append(sum(report.num_grown_accepted for report in reports))
    # Sums have another order: a near tie may go the other way.
    assert abs(accepted[0] - accepted[1]) <= 2 and min(accepted) > 5


def test_a_cut_head_drafts_for_several_requests(folder: Path, head: Path, truth: Texts) -> None:
    found, reports = asyncio.run(ask(drafting(folder, head, 2, deterministic=True), speculate=True))
    assert found == truth
    assert sum(report.num_grown_accepted for report in reports) > 5


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_ends_or_hangs_is_named(
    folder: Path, fault: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    process, engine = await start_engine(options_for(folder, 2, rank_seconds=2.0), lambda report: None)
    try:
        assert await process.ready(asyncio.Event()) is not None
        # Not those that compiled kernels.
        family = psutil.Process(process._process.pid).children()
        (rank,) = [child for child in family if "verify_service.engine.rank_worker" in child.cmdline()]
        updates: asyncio.Queue[GenerationUpdate] = asyncio.Queue()
        prompt, params = jobs()[0]
        engine.submit(GenerationRequest("r", prompt, params, 200, disable_speculation=True), updates.put_nowait)
        assert (await asyncio.wait_for(updates.get(), 20)).error is None
        rank.send_signal(fault)
        last = await asyncio.wait_for(updates.get(), 20)
        while not last.last:
            last = await asyncio.wait_for(updates.get(), 20)
        assert isinstance(last.error, UnavailableError) and "rank 1 of 2" in last.error.message
        await asyncio.wait_for(engine.lost(), 20)
    finally:
        await process.close()
    assert "rank 1 of 2" in capfd.readouterr().err
    wait_until(lambda: is_gone(rank))


async def test_more_ranks_than_gpus_are_refused(folder: Path) -> None:
    options = options_for(folder, 2, device=f"cuda:{torch.cuda.device_count() - 1}")
    with pytest.raises(ConfigError, match=r"need .* GPUs, and torch sees"):
        await ask(options)
