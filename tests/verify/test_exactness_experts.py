"""Models with experts write what transformers writes, whatever trees, chunks, prefix hits and padding there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_harness import VOCAB, jobs, make_paged_engine, small_model
from harness import make_engine, run_all, tokens
from local_draft import LocalDraft, noise, oracle
from threaded_engine import ThreadedEngine

from kernels.expert_tiles import Routes
from kernels.experts import route
from outrider.layers import experts
from outrider.models.decoder import CausalLM
from outrider.sampling.params import SamplingParams
from verify_service.executors.torch_executor import TorchExecutor

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**EXPERTS, "norm_topk_prob": True},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12, "eos_token_id": None},
}
PROMPTS = [prompt for prompt, _ in jobs()]
GREEDY = SamplingParams(temperature=0.0)


Written = tuple[CausalLM, list[list[int]]]
"""A model, and what transformers writes behind each prompt, greedily."""


@pytest.fixture(scope="module")
def families() -> dict[str, Written]:
    """Those that a test has asked for; a parameter beside others would have each made anew for each test."""
    return {}


@pytest.fixture
def written(request: pytest.FixtureRequest, families: dict[str, Written], tmp_path: Path) -> Written:
    if request.param not in families:
        families[request.param] = write(request.param, tmp_path)
    return families[request.param]


def write(family: str, folder: Path) -> Written:
    import transformers

    model = small_model(folder, family, **FAMILIES[family])
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    reference.generation_config.eos_token_id = None
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        text = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=60
        )
        texts.append(text[0, len(prompt) :].tolist())
    return model, texts


KINDS, GUESSES = ["torch", "paged", "deterministic"], ["oracle", "random"]
CASES = [
    (family, kind, GUESSES[(row + column) % 2])
    for row, family in enumerate(FAMILIES)
    for column, kind in enumerate(KINDS)
]
"""Every two of family, kind of engine and guesses meet."""


@pytest.mark.parametrize(("written", "kind", "guesses"), CASES, indirect=["written"])
def test_text_is_transformers(written: Written, engines: list[ThreadedEngine], kind: str, guesses: str) -> None:
    model, texts = written
    if kind == "torch":
        engine = make_engine(model, chunk_size=16)
    else:
        engine, _ = make_paged_engine(model, deterministic=kind == "deterministic")
    engines.append(engine)
    known = {tuple(prompt): prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)}
    guess = oracle(known, VOCAB) if guesses == "oracle" else noise(9, VOCAB)
    engine.draft_connected(LocalDraft(engine, VOCAB, guess))
    engine.start()
    answers = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS], max_tokens=12)
    assert tokens(answers) == texts
    if guesses == "oracle":
        assert sum(answer.num_accepted for answer in answers) > 0.5 * sum(map(len, texts))
    assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)


@pytest.mark.parametrize("written", ["Qwen2Moe", "GptOss"], indirect=True)
def test_rounds_are_measured_with_tokens_that_wake_different_experts(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = written
    woken: list[torch.Tensor] = []

    def noted(*args: Any) -> Routes:
        routes = route(*args)
        woken.append(routes.experts)
        return routes

    monkeypatch.setattr(experts, "route", noted)
    _, paged = make_paged_engine(model)
    for executor in (TorchExecutor(model, 64, 4), paged):
        woken.clear()
        executor.measure(8, context=16)
        real = woken[0][woken[0][:, 0] >= 0]
        assert len(real) == 8
        assert len(real.unique()) > 3
