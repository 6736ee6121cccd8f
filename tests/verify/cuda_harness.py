"""The GPU's executor on a small model, under an engine; runs on a CPU, too."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import PAGE_SIZE, Answer, Silence
from safetensors.torch import save_file
from threaded_engine import ThreadedEngine

from outrider.attention.base import AttentionBackend
from outrider.attention.triton_backend import TritonAttention
from outrider.grammar.compiler import GrammarVocabulary
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.config import eagle3_config
from outrider.models.drafters.heads import Eagle3Head
from outrider.models.loader import load_model
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import EXACT, AcceptRule
from verify_service.engine.build import round_growth
from verify_service.engine.memory import Memory
from verify_service.engine.round import Growth
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.cuda import CudaExecutor
from verify_service.executors.ranks import ExecutorLink
from verify_service.executors.round_buffers import MAX_DEPTH
from verify_service.executors.round_drafts import DraftingOptions
from verify_service.speculation.budget import CostModel

VOCAB = 61
RANKS_VOCAB = 62
"""Ranks have the same number of rows of the output matrix."""

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=3),
    SamplingParams(temperature=1.0, seed=4, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(temperature=1.2, seed=5, top_k=12, min_p=0.02, logit_bias={7: 3.0, 9: -100.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, num_logprobs=0),
    SamplingParams(temperature=0.7, seed=2**64 - 1, choice_index=3, num_logprobs=3),
]
"""One of each way to sample."""


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 40 tokens, some with a shared beginning, with all kinds of sampling."""
    source = random.Random(5)
    shared = [source.randrange(VOCAB) for _ in range(19)]
    prompts = [[source.randrange(VOCAB) for _ in range(source.randint(1, 40))] for _ in range(5)]
    for place in (1, 4, 7):  # apart, so that a later one finds an earlier one's pages in the cache
        prompts.insert(place, [*shared, source.randrange(VOCAB)])
    return [(prompt, KINDS[i % len(KINDS)]) for i, prompt in enumerate(prompts)]


def texts(truth: Sequence[Answer]) -> dict[tuple[int, ...], list[int]]:
    """What the jobs' prompts and answers were, for drafts that know it all."""
    return {tuple(prompt): prompt + answer.token_ids for (prompt, _), answer in zip(jobs(), truth, strict=True)}


def small_model(
    folder: Path,
    family: str = "Llama",
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **changes: Any,
) -> CausalLM:
    """A random model of 61 tokens; its logits are spread, so that text does not hang on rounding."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 60,
    }
    config = getattr(transformers, f"{family}Config")(**sizes | changes)
    torch.manual_seed(11)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(5.0)
    model.save_pretrained(folder)
    return load_model(folder, dtype, device)


def save_random_head(folder: Path, sizes: dict[str, Any]) -> None:
    """An EAGLE-3 head of random weights for a model of two layers, and of these sizes."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]},
        **sizes,
    }
    config = eagle3_config(fields, {"fc.weight"}, 2)
    shapes = Eagle3Head(config, torch.float32, torch.device("meta")).checkpoint_tensors()
    generator = torch.Generator().manual_seed(7)
    tensors = {"d2t": torch.zeros(config.draft_vocab_size, dtype=torch.int64)}
    for name, tensor in shapes.items():
        scale = tensor.shape[-1] ** -0.5
        drawn = torch.randn(tensor.shape, generator=generator) * 2 * scale
        tensors[name.replace("layers.0", "midlayer")] = drawn if tensor.ndim > 1 else torch.ones(tensor.shape)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")


def make_paged_engine(
    model: CausalLM,
    num_pages: int = 256,
    page_size: int = PAGE_SIZE,
    attention: AttentionBackend | None = None,
    use_graphs: bool = True,
    max_graph_rows: int = 64,
    deterministic: bool = False,
    rule: AcceptRule = EXACT,
    vocabulary: GrammarVocabulary | None = None,
    draft: DraftModel | None = None,
    growth: Growth | None = None,
    link: ExecutorLink | None = None,
    **limits: Any,
) -> tuple[ThreadedEngine, CudaExecutor]:
    """An engine that finds every draft token cheap, so that speculation is exercised.

    `draft` grows trees inside rounds, `growth` much each time if it is given.
    """
    memory = Memory(num_pages, page_size, share_generated=not deterministic)
    values: dict[str, Any] = {
        "vocab_size": model.config.vocab_size,
        "context_length": model.config.max_positions,
        "max_running": 8,
        "chunk_size": 16,
        "max_nodes": 24,
        "max_round_tokens": 32,
        "max_depth": MAX_DEPTH,
        "root_apart": True,
        "deterministic": deterministic,
    }
    bounds = EngineLimits(**values | limits)
    executor = CudaExecutor(
        *(model, num_pages, page_size, bounds, attention or TritonAttention(), link),
        max_graph_rows=max_graph_rows,
        use_graphs=use_graphs,
        rule=rule,
    )
    if draft is not None:
        options = DraftingOptions("test", branching=3, lone_branching=4, max_steps=4, max_width=8, region=64)
        executor.draft_inside(draft, options)
    executor.capture()
    widths = executor.buckets.widths
    cost = CostModel([1e-3] * len(widths), widths, executor.buckets.width)
    inside = None if draft is None else round_growth(executor, memory, cost, growth)
    return ThreadedEngine(executor, memory, cost, bounds, Silence(), vocabulary=vocabulary, growth=inside), executor
