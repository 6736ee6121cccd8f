"""Models that transformers runs, in CUDA graphs: eager mode's texts bit by bit, and those of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign_families
import pytest
import torch
from cuda_harness import VOCAB, jobs, make_paged_engine, small_model, texts
from foreign_families import GEMMA_4, WINDOW
from harness import make_engine, run_all
from local_draft import LocalDraft, oracle
from scripted_rounds import run_rounds
from threaded_engine import ThreadedEngine
from tiny_models import save_tiny

from outrider.errors import ConfigError
from outrider.models.loader import load_model
from outrider.models.transformers_model import TransformersLM

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Cohere": ("Cohere", {}),
    "Glm4": ("Glm4", {"head_dim": 24}),
    "Cohere2": ("Cohere2", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "Gemma2": ("Gemma2", {"sliding_window": 16}),
    "Gemma4": ("Gemma4Text", {**GEMMA_4, "head_dim": 256, "global_head_dim": 512, "vocab_size_per_layer_input": VOCAB}),
    "Gemma3n": (
        "Gemma3nText",
        {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [WINDOW, "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8}
        | {"sliding_window": 16, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "pad_token_id": 0},
    ),
    "Olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in foreign_families.FAMILIES]


@pytest.fixture(scope="module", params=[*FAMILIES, *OTHERS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("model-")
    if request.param in FAMILIES:
        family, sizes = FAMILIES[request.param]
        small_model(made, family, **{"pad_token_id": None} | sizes)
    else:
        family, sizes = foreign_families.FAMILIES[request.param]
        save_tiny(made, family, **sizes)
    return made


def load(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> TransformersLM:
    model = load_model(folder, dtype, device, impl="transformers")
    assert isinstance(model, TransformersLM)
    return model


def load_on_gpu(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersLM | None:
    """None for a model with experts in float32, which is refused by name."""
    try:
        return load(folder, "cuda", dtype)
    except ConfigError as error:
        assert "has experts" in error.message and dtype == torch.float32
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_say_what_eager_mode_says_bit_by_bit(folder: Path, dtype: torch.dtype) -> None:
    model = load_on_gpu(folder, dtype)
    if model is None:
        return
    sizes = {"max_running": 4, "max_round_tokens": 28, "max_nodes": 24}
    eager, eager_executor = make_paged_engine(model, use_graphs=False, **sizes)
    expected = run_rounds(eager_executor, eager.memory, jobs(), 4)
    engine, executor = make_paged_engine(model, **sizes)
    assert len(executor.graphs) == len(executor.buckets.all())
    assert run_rounds(executor, engine.memory, jobs(), 4) == expected


def test_texts_are_those_of_a_cpu_with_trees_and_prefix_hits(folder: Path) -> None:
    on_gpu = load_on_gpu(folder)
    if on_gpu is None:
        pytest.skip("experts do not run in float32")
    engine = make_engine(load(folder, "cpu"))
    engine.start()
    truth = run_all(engine, jobs(), width=1, speculate=False)
    engine.stop()
    fast: ThreadedEngine = make_paged_engine(on_gpu)[0]
    fast.draft_connected(LocalDraft(fast, VOCAB, oracle(texts(truth), VOCAB)))
    fast.start()
    answers = run_all(fast, jobs())
    fast.stop()
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert sum(answer.num_accepted for answer in answers) > 0
