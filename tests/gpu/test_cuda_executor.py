"""Rounds on the GPU: graphs against eager mode, answers against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from cuda_harness import jobs, make_paged_engine
from harness import run_all
from scripted_rounds import run_rounds

from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model
from outrider.sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at",
]
NUM_TOKENS = 32


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("width", [1, 4])
def test_eager_mode_says_the_same_bit_by_bit(
    small_models: Callable[..., CausalLM], width: int, deterministic: bool
) -> None:
    model = small_models()
    sizes = {"max_running": 4, "max_round_tokens": 28, "max_nodes": 24, "deterministic": deterministic}
    eager, eager_executor = make_paged_engine(model, use_graphs=False, **sizes)
    plain = run_rounds(eager_executor, eager.memory, jobs(), width)
    expected = run_rounds(eager_executor, eager.memory, jobs(), width, plain)
    engine, executor = make_paged_engine(model, **sizes)
    assert len(executor.graphs) == len(executor.buckets.all()) and not len(eager_executor.graphs)
    # The same radix hits.
    run_rounds(executor, engine.memory, jobs(), width)
    assert run_rounds(executor, engine.memory, jobs(), width, plain) == expected


def test_capture_reports_its_time_and_memory(small_models: Callable[..., CausalLM]) -> None:
    _, executor = make_paged_engine(small_models(), max_running=2, max_round_tokens=4)
    assert executor.graphs.seconds > 0 and executor.graphs.num_bytes >= 0


def test_rounds_with_more_requests_than_are_captured_run_eagerly(small_models: Callable[..., CausalLM]) -> None:
    model = small_models()
    engine, executor = make_paged_engine(model, max_running=4, max_round_tokens=28, max_graph_rows=1)
    assert 0 < len(executor.graphs) < len(executor.buckets.all())
    answers = run_rounds(executor, engine.memory, jobs(), 4)
    whole, whole_executor = make_paged_engine(model, max_running=4, max_round_tokens=28)
    assert run_rounds(whole_executor, whole.memory, jobs(), 4) == answers


@pytest.mark.parametrize(("dtype", "tie"), [(torch.float32, 0.02), (torch.bfloat16, 0.5)])
def test_greedy_text_is_that_of_transformers(test_model: Path, dtype: torch.dtype, tie: float) -> None:
    """Until the two best tokens of transformers in float32 are nearer than `tie`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(test_model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(test_model, dtype=torch.float32).cuda().eval()
    engine, _ = make_paged_engine(
        load_model(test_model, dtype, "cuda"), 256, 16, max_running=4, max_round_tokens=4, chunk_size=64
    )
    engine.start()
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    answers = run_all(engine, [(ids, GREEDY) for ids in prompts], 4, max_tokens=NUM_TOKENS)
    engine.stop()
    same = []
    for ids, answer in zip(prompts, answers, strict=True):
        given = torch.tensor([ids], device="cuda")
        output = theirs.generate(
            given,
            attention_mask=torch.ones_like(given),
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        text = output[0, len(ids) :].tolist()
        with torch.inference_mode():
            logits = theirs(output).logits[0, len(ids) - 1 : -1]
        best = logits.topk(2).values
        differs = [index for index in range(NUM_TOKENS) if text[index] != answer.token_ids[index]]
        same.append(differs[0] if differs else NUM_TOKENS)
        if differs:
            gap = float(best[differs[0], 0] - best[differs[0], 1])
            assert gap < tie, f"token {differs[0]} differs where transformers is sure by {gap}"
    print(f"{dtype}: equal tokens of {NUM_TOKENS} for each prompt: {same}")
