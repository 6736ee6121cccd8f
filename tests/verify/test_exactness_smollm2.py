"""The real model on a CPU: the same tokens whatever the draft, the batch and the memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import Answer, make_engine, run_all
from local_draft import Guess, LocalDraft, noise, oracle, wrong
from page_integrity import check_memory
from threaded_engine import ThreadedEngine
from tokenizers import Tokenizer

from outrider.device import choose_dtype
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model
from outrider.sampling.params import SamplingParams

VOCAB = 49152
PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "cpu.jsonl"
NUM_TOKENS = 32
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=0.8, top_p=0.95, seed=2, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, top_p=0.95, seed=3, repetition_penalty=1.15),
]

Job = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module", params=["float32", "auto"])
def model(model_path: Path, request: pytest.FixtureRequest) -> Iterator[CausalLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_model(model_path, choose_dtype(request.param))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def jobs(model_path: Path) -> list[Job]:
    """24 prompts of up to 120 tokens, each with one kind of sampling."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    made = []
    for index, line in enumerate(PROMPTS.read_text().splitlines()):
        turn = f"<|im_start|>user\n{json.loads(line)['prompt']}"
        made.append((tokenizer.encode(turn).ids[:120], KINDS[index % len(KINDS)]))
    return made


def run(engine: ThreadedEngine, jobs: list[Job], width: int, speculate: bool = True) -> list[Answer]:
    try:
        engine.start()
        return run_all(engine, jobs, width, max_tokens=NUM_TOKENS, speculate=speculate)
    finally:
        engine.stop()
        check_memory(engine.memory)


@pytest.fixture(scope="module")
def truth(model: CausalLM, jobs: list[Job]) -> list[Answer]:
    # In bfloat16 bits follow where a prompt is cut.
    return run(make_engine(model, 512, chunk_size=64), jobs, width=1, speculate=False)


def guesser(name: str, jobs: list[Job], truth: list[Answer]) -> Guess:
    texts = {tuple(prompt): prompt + answer.token_ids for (prompt, _), answer in zip(jobs, truth, strict=True)}
    return {"oracle": oracle(texts, VOCAB), "wrong": wrong(texts, VOCAB), "random": noise(3, VOCAB)}[name]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("name", ["oracle", "wrong", "random"])
def test_tokens_of_24_prompts_are_those_of_plain_decoding(
    model: CausalLM, jobs: list[Job], truth: list[Answer], name: str, width: int
) -> None:
    engine = make_engine(model, 48 if width == 1 else 64, chunk_size=64)
    draft = LocalDraft(engine, VOCAB, guesser(name, jobs, truth))
    engine.draft_connected(draft)
    answers = run(engine, jobs, width)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    if width == 4:
        assert engine.scheduler.num_preemptions > 0
    if name == "oracle":
        assert sum(answer.num_accepted for answer in answers) > 0.6 * len(jobs) * NUM_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["none", "oracle"])
def test_answers_that_share_a_prompt_are_those_of_plain_decoding(model_path: Path, jobs: list[Job], name: str) -> None:
    """In float32: in bfloat16 bits follow where a prompt is cut, and so where what is shared of it ends."""
    model = load_model(model_path, torch.float32)
    prompt = [token for tokens, _ in jobs[:6] for token in tokens]
    group = [(prompt, params) for params in KINDS] + [(prompt[:300] + tail, params) for tail, params in jobs[6:8]]
    truth = run(make_engine(model, 512, chunk_size=64, keep_prefixes=False), group, width=1, speculate=False)
    engine = make_engine(model, 512, chunk_size=64)
    if name != "none":
        engine.draft_connected(LocalDraft(engine, VOCAB, guesser(name, group, truth)))
    answers = run(engine, group, width=len(group))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    shared = [max(update.cached_prompt_tokens for update in answer.updates) for answer in answers]
    assert shared[0] == 0 and min(shared[1:]) >= 300
