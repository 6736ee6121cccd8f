"""Ranks on a CPU give the text of one: with trees, full memory, prefixes and features; faults end the service."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from cuda_harness import RANKS_VOCAB, jobs, make_paged_engine, texts
from feature_draft import FeatureDraft
from harness import Answer, make_engine, run_all, tokens
from local_draft import LocalDraft, noise, oracle
from rank_threads import linked, ranked
from safetensors.torch import load_file, save_file
from service_process import is_gone, wait_until
from threaded_engine import ThreadedEngine

from outrider.config.base import parse_options
from outrider.config.verify import VerifyOptions
from outrider.errors import UnavailableError
from outrider.models.base import LanguageModel
from outrider.models.decoder import CausalLM
from outrider.models.drafters.heads import StandaloneDraft
from outrider.models.loader import load_decoder
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.sampling.params import SamplingParams
from verify_service import main
from verify_service.engine.round import Growth

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(ranks_folder: Path) -> Path:
    return ranks_folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_decoder(folder)


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in processes of their own time their rounds once."""
    monkeypatch.setattr(main, "ENGINE_MODULE", "quick_worker")
    paths = [str(Path(__file__).parent / "faulty"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture(params=[2, 4])
def two(folder: Path, request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    with ranked(folder, request.param) as model:
        yield model


@pytest.mark.parametrize(
    ("two", "name", "num_pages"),
    [
        *((2, "none", 256), (2, "oracle", 24), (2, "random", 256)),
        *((4, "none", 24), (4, "oracle", 256), (4, "random", 24)),
    ],
    indirect=["two"],
)
def test_the_text_is_that_of_one_rank(
    two: CausalLM, truth: list[Answer], engines: list[ThreadedEngine], name: str, num_pages: int
) -> None:
    engine = make_engine(two, num_pages, chunk_size=16)
    engines.append(engine)
    if name != "none":
        guess = oracle(texts(truth), RANKS_VOCAB) if name == "oracle" else noise(9, RANKS_VOCAB)
        engine.draft_connected(LocalDraft(engine, RANKS_VOCAB, guess))
    engine.start()
    answers = run_all(engine, jobs(), 4)
    engine.stop()
    assert tokens(answers) == tokens(truth)
    if name == "oracle":
        assert sum(answer.num_accepted for answer in answers) > 50
    if num_pages == 24:
        assert engine.scheduler.num_preemptions > 0
    else:
        assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)


def test_features_come_from_rank_0(
    two: CausalLM, model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine]
) -> None:
    engine = make_engine(two, chunk_size=16)
    engines.append(engine)
    draft = FeatureDraft(engine, RANKS_VOCAB, oracle(texts(truth), RANKS_VOCAB), (0, 1, 3))
    draft.connect()
    engine.start()
    answers = run_all(engine, jobs(), 4)
    engine.stop()
    assert tokens(answers) == tokens(truth)
    assert draft.check(model) > 145


@pytest.mark.parametrize(
    ("name", "num_pages", "deterministic"),
    [("none", 256, False), ("none", 24, True), ("oracle", 256, True), ("oracle", 24, False)],
)
def test_ranks_that_replay_rounds_give_the_text_of_one(
    folder: Path, truth: list[Answer], name: str, num_pages: int, deterministic: bool
) -> None:
    with linked(folder, 2, num_pages=num_pages, deterministic=deterministic) as engine:
        if name == "oracle":
            engine.draft_connected(LocalDraft(engine, RANKS_VOCAB, oracle(texts(truth), RANKS_VOCAB)))
        engine.start()
        answers = run_all(engine, jobs(), 4)
        engine.stop()
        assert tokens(answers) == tokens(truth)
        if name == "oracle":
            assert sum(answer.num_accepted for answer in answers) > 50
        if num_pages == 24:
            assert engine.scheduler.num_preemptions > 0


def test_trees_that_grow_inside_rounds_are_rank_0s_alone(folder: Path, model: CausalLM, truth: list[Answer]) -> None:
    with linked(folder, 2, draft=StandaloneDraft(model, ""), growth=Growth(3, 16)) as engine:
        engine.start()
        answers = run_all(engine, jobs(), 4)
        engine.stop()
        assert tokens(answers) == tokens(truth)
        assert sum(answer.num_accepted for answer in answers) > 50


def test_ranks_have_their_part_of_the_logits_of_prompts(
    folder: Path, model: CausalLM, engines: list[ThreadedEngine]
) -> None:
    given = [(prompt, GREEDY) for prompt, _ in jobs()]
    engine, _ = make_paged_engine(model)
    engines.append(engine)
    engine.start()
    expected = run_all(engine, given, 2, num_prompt_logprobs=2, max_tokens=4)
    with linked(folder, 2) as engine:
        engine.start()
        found = run_all(engine, given, 2, num_prompt_logprobs=2, max_tokens=4)
        engine.stop()
    assert tokens(found) == tokens(expected)
    for answer, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(prompt_logprobs(answer), prompt_logprobs(other), atol=1e-4)
    assert sum(len(prompt_logprobs(answer)) for answer in found) > 70


@pytest.mark.parametrize("is_linked", [False, True])
def test_of_equal_logits_on_two_ranks_the_lowest_id_is_first(
    folder: Path, tmp_path: Path, engines: list[ThreadedEngine], is_linked: bool
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    half = RANKS_VOCAB // 2
    tensors["lm_head.weight"][half:] = tensors["lm_head.weight"][:half]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    given = [(prompt, SamplingParams(temperature=0.0, num_logprobs=4)) for prompt, _ in jobs()]
    with ExitStack() as stack:
        if is_linked:
            engine = stack.enter_context(linked(tmp_path, 2))
        else:
            engine = make_engine(stack.enter_context(ranked(tmp_path, 2)), chunk_size=16)
        engines.append(engine)
        engine.start()
        answers = run_all(engine, given, 4, max_tokens=8)
        engine.stop()
    listed = [one for answer in answers for update in answer.updates for one in update.logprobs]
    assert len(listed) > 35 and max(token for answer in answers for token in answer.token_ids) < half
    for one in listed:
        (first, a), (second, b), (third, c), (fourth, d) = one.top
        assert (second, b, fourth, d) == (first + half, a, third + half, c)


def test_memory_that_ends_before_ranks_meet_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits for rank 0's logits: who went on without them would be a step ahead of it."""
    with linked(folder, 2) as engine:
        head = engine._executor._model.head
        product, is_first = head.to_float32, True

        def fail_once(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal is_first
            if is_first:
                is_first = False
                raise torch.OutOfMemoryError("no room")
            return product(hidden)

        monkeypatch.setattr(head, "to_float32", fail_once)
        engine.start()
        answers = run_all(engine, [(prompt, GREEDY) for prompt, _ in jobs()[:2]], 2, num_prompt_logprobs=2)
    for answer in answers:
        error = answer.updates[-1].error
        assert isinstance(error, UnavailableError) and "no memory on rank 0 for log-probabilities" in error.message


def prompt_logprobs(answer: Answer) -> list[float]:
    return [value for update in answer.updates for piece in update.prompt_logprobs for value in piece.logprobs]


def options_for(folder: Path, **fields: object) -> VerifyOptions:
    values: dict[str, object] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 1024}
    values |= {"metrics_address": "", "draft": (), "tensor_parallel_size": 2}
    return VerifyOptions(model=str(folder), **values | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [None, signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_ends_or_hangs_ends_the_engine_with_its_name(
    folder: Path, quick_start: None, fault: signal.Signals | None
) -> None:
    seconds = 2.0 if fault == signal.SIGSTOP else 60.0
    process, engine = await main.start_engine(options_for(folder, rank_seconds=seconds), lambda report: None)
    try:
        assert await process.ready(asyncio.Event()) is not None
        (rank,) = psutil.Process(process._process.pid).children()
        updates: asyncio.Queue[GenerationUpdate] = asyncio.Queue()
        asked = GenerationRequest("r", [1, 2], GREEDY, 200 if fault else 16, disable_speculation=True)
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
            assert isinstance(last.error, UnavailableError)
            assert "rank 1 of 2" in last.error.message
            await asyncio.wait_for(engine.lost(), 20)
    finally:
        await process.close()
    assert process._process.returncode == (0 if fault is None else 1)
    wait_until(lambda: is_gone(rank))


BUSY_START = """
import sys, threading
import msgspec
from outrider.config.verify import VerifyOptions
from verify_service.executors import ranks

ranks._GRACE_SECONDS = ranks._REFUSAL_SECONDS = 0.2
followers = ranks.Followers(msgspec.json.decode(sys.argv[1], type=VerifyOptions))
if sys.argv[2] == "end idle":
    followers.started()
if sys.argv[2].startswith("end"):
    followers._processes[1].kill()
threading.Event().wait(60)
"""
"""A rank 0 that waits for its device or for requests, not for other ranks."""


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("end", 1, "(SIGKILL)"),
        ("end idle", 1, "(SIGKILL)"),
        ("refuse", 2, "--context-length: 4096"),
        ("fail", 1, "(RuntimeError: set_num_threads"),
    ],
)
def test_a_rank_that_ends_ends_a_rank_0_that_waits_for_something_else(
    folder: Path, end: str, code: int, words: str
) -> None:
    fields = {"refuse": {"context_length": 4096}, "fail": {"threads": -1}}
    options = options_for(folder, **fields.get(end, {}))
    command = [sys.executable, "-c", BUSY_START, msgspec.json.encode(options).decode(), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code, done.stderr
    assert "rank 1" in done.stderr and words in done.stderr


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tp-size", "--tp", "-tp"])
def test_the_option_has_the_names_of_other_engines(flag: str) -> None:
    assert parse_options(VerifyOptions, [flag, "4"]).tensor_parallel_size == 4
