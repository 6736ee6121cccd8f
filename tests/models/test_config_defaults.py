"""What a config.json leaves out is what transformers' class of the family has for it, and so is what it cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import relative_error, run_one, token_ids

from outrider.models.config import ModelConfig
from outrider.models.families import FAMILIES
from outrider.models.loader import load_decoder

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    # Larger by default than such a vocabulary.
    "pad_token_id": None,
}
EXPERTS: dict[str, dict[str, int]] = {
    "Qwen2MoeForCausalLM": {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "Qwen3MoeForCausalLM": {"num_experts": 6, "moe_intermediate_size": 24},
    "MixtralForCausalLM": {"num_local_experts": 6},
    "GptOssForCausalLM": {"num_local_experts": 6},
}
TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "SmolLM3ForCausalLM": "smollm3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "GptOssForCausalLM": "gpt_oss",
}
KINDS = ["full_attention", "sliding_attention"] * 2
ASKED = {"use_sliding_window": True, "sliding_window": 9}
LATE = {**ASKED, "max_window_layers": 2}
FACTORS = [1.0 + step / 10 for step in range(8)]
LONG_FACTORS = [2.0 + step for step in range(8)]
OWN_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("MistralForCausalLM", {"use_sliding_window": False, "sliding_window": 9}),
    ("MistralForCausalLM", {"head_dim": 16, "sliding_window": 9, "layer_types": KINDS}),
    ("Qwen2ForCausalLM", LATE),
    ("Qwen2MoeForCausalLM", LATE),
    ("Qwen2MoeForCausalLM", {"qkv_bias": False}),
    ("Qwen3MoeForCausalLM", LATE),
    ("Gemma2ForCausalLM", {"sliding_window": 9, "sliding_window_pattern": 3}),
    ("SmolLM3ForCausalLM", {**ASKED, "no_rope_layers": [1, 0, 1, 0]}),
    ("GptOssForCausalLM", {"sliding_window": 9, "rope_parameters": None}),
    ("LlamaForCausalLM", {"final_logit_softcapping": 1.0, "residual_multiplier": 0.5}),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}),
    ("MistralForCausalLM", {"attention_bias": True}),
    ("MinistralForCausalLM", {"attention_bias": True, "head_dim": 16}),
    ("Phi3ForCausalLM", {"attention_bias": True}),
    ("MixtralForCausalLM", {"attention_bias": True}),
    ("Gemma3ForCausalLM", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    ("Gemma3ForCausalLM", {"head_dim": 16, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5}),
    ("MixtralForCausalLM", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5}),
    (
        "LlamaForCausalLM",
        {
            "original_max_position_embeddings": 32,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    (
        "Phi3ForCausalLM",
        {"rope_scaling": {"type": "yarn", "short_factor": FACTORS, "long_factor": LONG_FACTORS}},
    ),
]


def write(folder: Path, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    experts = {**EXPERTS[architecture], "num_experts_per_tok": 2} if architecture in EXPERTS else {}
    written = {"architectures": [architecture], "model_type": TYPES[architecture], **SIZES, **experts, **fields}
    (folder / "config.json").write_text(json.dumps(written))
    return written


def check(folder: Path, architecture: str, fields: dict[str, Any]) -> None:
    """Logits, which every field but the size of a wide window is in, and those that are not."""
    written = write(folder, architecture, fields)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(3)
    auto: Any = transformers.AutoModelForCausalLM
    reference = auto.from_config(theirs, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "generation_config.json").unlink(missing_ok=True)
    # For longrope transformers goes by the text's length, and this one by the context's.
    model = load_decoder(folder, context_length=0 if TYPES[architecture] != "phi3" else 4096)
    ids = token_ids(40)
    with torch.inference_mode():
        expected = reference(ids[None], use_cache=False).logits[0]
    assert relative_error(run_one(model, model.new_kv(40), ids, torch.arange(40)), expected) < 1e-4
    ours = ModelConfig.from_folder(folder)
    assert (ours.rms_norm_eps, ours.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert windows(ours) == windows_of(theirs)


def windows(config: ModelConfig) -> list[int]:
    return [config.window_of(layer) for layer in range(config.num_layers)]


def windows_of(config: Any) -> list[int]:
    """By transformers' class."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


@pytest.mark.parametrize("architecture", TYPES)
def test_what_is_left_out(architecture: str, tmp_path: Path) -> None:
    # Transformers does not run a Ministral without.
    check(tmp_path, architecture, {"head_dim": 16} if architecture == "MinistralForCausalLM" else {})


@pytest.mark.parametrize(("architecture", "fields"), OWN_FIELDS)
def test_what_is_said_in_a_family_s_own_way(architecture: str, fields: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, architecture, fields)


def test_each_family_of_transformers_is_compared() -> None:
    others = {"MiMoForCausalLM", "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"}
    assert set(FAMILIES) == set(TYPES) | others
