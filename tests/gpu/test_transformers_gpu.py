"""Models that transformers runs, in CUDA graphs: eager mode's texts bit by bit, and those of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_harness import VOCAB, jobs, make_paged_engine, small_model, texts
from harness import make_engine, run_all
from local_draft import LocalDraft, oracle
from scripted_rounds import run_rounds
from threaded_engine import ThreadedEngine

from outrider.errors import ConfigError
from outrider.models.loader import load_model
from outrider.models.transformers_model import TransformersLM

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Cohere": {},
    "Glm4": {"head_dim": 24},
    "Cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2": {"sliding_window": 16},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(f"{request.param}-")
    small_model(made, request.param, **{"pad_token_id": None} | FAMILIES[request.param])
    return made


def load(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> TransformersLM:
    model = load_model(folder, dtype, device, impl="transformers")
    assert isinstance(model, TransformersLM)
    return model


def is_refused(folder: Path, dtype: torch.dtype) -> bool:
    return folder.name.startswith("Olmoe") and dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_say_what_eager_mode_says_bit_by_bit(folder: Path, dtype: torch.dtype) -> None:
    if is_refused(folder, dtype):
        with pytest.raises(ConfigError, match="OlmoeForCausalLM has experts"):
            load(folder, "cuda", dtype)
        return
    model = load(folder, "cuda", dtype)
    sizes = {"max_running": 4, "max_round_tokens": 28, "max_nodes": 24}
    eager, eager_executor = make_paged_engine(model, use_graphs=False, **sizes)
    expected = run_rounds(eager_executor, eager.memory, jobs(), 4)
    engine, executor = make_paged_engine(model, **sizes)
    assert len(executor.graphs) == len(executor.buckets.all())
    assert run_rounds(executor, engine.memory, jobs(), 4) == expected


def test_texts_are_those_of_a_cpu_with_trees_and_prefix_hits(folder: Path) -> None:
    if is_refused(folder, torch.float32):
        pytest.skip("experts do not run in float32")
    engine = make_engine(load(folder, "cpu"))
    engine.start()
    truth = run_all(engine, jobs(), width=1, speculate=False)
    engine.stop()
    fast: ThreadedEngine = make_paged_engine(load(folder, "cuda"))[0]
    fast.draft_connected(LocalDraft(fast, VOCAB, oracle(texts(truth), VOCAB)))
    fast.start()
    answers = run_all(fast, jobs())
    fast.stop()
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert sum(answer.num_accepted for answer in answers) > 0
