"""Tiny random checkpoints, and forwards of one request, for the tests of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.cache.kv import KVCache
from outrider.models.decoder import CausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}


def save_tiny(folder: Path, family: str = "Llama", max_shard_size: str = "1GB", **changes: Any) -> Any:
    """Save a random `family` model to `folder`; returns transformers' own model, in eval mode and float32."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family.removesuffix('Text')}{head}")(config).eval()
    # Others leave out caps of scores in some versions.
    model.set_attn_implementation("eager")
    for module in model.modules():
        if hasattr(module, "limit") and hasattr(config, "swiglu_limit"):
            # Up to transformers 5.17 gpt-oss has 7.0, whatever the configuration says.
            module.limit = config.swiglu_limit
    with torch.no_grad():
        # The default start, biases of zero and norms of one, would hide a weight in the wrong place.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def put_within(folder: Path) -> None:
    """Turn the Mistral in `folder` into the text part of a larger model."""
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.layers.0.attention.q_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    fields = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**text, "architectures": None}}
    (folder / "config.json").write_text(json.dumps(fields))


def token_ids(num_tokens: int, vocab_size: int = 97, seed: int = 0) -> Tensor:
    """Random ids, int64 [num_tokens]."""
    return torch.randint(0, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def run_one(
    model: CausalLM,
    kv: KVCache,
    ids: Tensor,
    slots: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Logits [M, vocab] of `ids` as the last tokens of a request whose slots are `slots`."""
    start = slots.numel() - ids.numel()
    if positions is None:
        positions = torch.arange(start, slots.numel())
    batch = ForwardBatch(ids, positions, [Segment(ids.numel(), slots, mask)])
    return model.logits(model.forward(batch, kv, TorchAttention()))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return float((actual - expected).abs().max() / expected.abs().max())


def _tree_mask(parents: list[int]) -> Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask


def check_chunks_and_tree(model: Any, reference: Any) -> None:
    """Logits of a text in two chunks and of a tree below it are those of every path, run alone by transformers."""
    length, chunk = 12, 5
    ids = token_ids(length)
    kv = model.new_kv(64)
    slots = torch.randperm(64)[: length + 5]
    chunks = [run_one(model, kv, ids[:chunk], slots[:chunk]), run_one(model, kv, ids[chunk:], slots[:length])]
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert relative_error(torch.cat(chunks), expected) < 1e-4
    parents, nodes = [-1, 0, -1, 2, 2], token_ids(5, seed=3)
    depths = torch.tensor([0, 1, 0, 1, 1])
    logits = run_one(model, kv, nodes, slots, _tree_mask(parents), length + depths)
    for node, parent in enumerate(parents):
        path = [node] if parent < 0 else [parent, node]
        with torch.inference_mode():
            alone = reference(torch.cat((ids, nodes[path]))[None]).logits[0, -1]
        assert relative_error(logits[node], alone) < 1e-4
