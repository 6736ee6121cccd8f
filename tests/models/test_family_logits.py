"""Every member of the family computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import relative_error, run_one, save_tiny, token_ids

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.loader import load_model

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa-head-dim": ("Llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2-moe-some-layers": (
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-every-other": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "decoder_sparse_step": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-tied-bias": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}

ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "truncate": False,
    },
}


def check_against_transformers(folder: Path, reference: Any) -> None:
    ids = token_ids(120)
    model = load_model(folder)
    logits = run_one(model, model.new_kv(120), ids, torch.arange(120))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    check_against_transformers(tmp_path, save_tiny(tmp_path, family, **changes))


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_equals_transformers(name: str, tmp_path: Path) -> None:
    check_against_transformers(tmp_path, save_tiny(tmp_path, rope_parameters=ROPES[name]))


def test_sharded_checkpoint_equals_single_file(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_against_transformers(tmp_path, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path)
    model = load_model(tmp_path, dtype)
    ids = token_ids(40)
    logits = run_one(model, model.new_kv(40), ids, torch.arange(40))
    with torch.inference_mode():
        assert relative_error(logits, reference(ids[None]).logits[0]) < 0.05


def test_features_are_the_residual_stream_entering_each_layer(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path)
    model = load_model(tmp_path)
    ids = token_ids(10)
    batch = ForwardBatch(ids, torch.arange(10), [Segment(10, torch.arange(10))])
    _, features = model.forward_with_features(batch, model.new_kv(10), TorchAttention(), (2, 0, 1))
    with torch.inference_mode():
        expected = reference(ids[None], output_hidden_states=True).hidden_states
    for layer, feature in zip((2, 0, 1), features, strict=True):
        assert relative_error(feature, expected[layer][0]) <= 1e-5


def test_last_feature_is_what_the_final_norm_takes(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = load_model(tmp_path)
    batch = ForwardBatch(token_ids(4), torch.arange(4), [Segment(4, torch.arange(4))])
    hidden, (feature, behind) = model.forward_with_features(batch, model.new_kv(4), TorchAttention(), (3, 4))
    assert hidden.shape == feature.shape
    assert not torch.equal(hidden, feature)
    assert torch.equal(hidden, behind)
