"""A trained head as a folder in the layout of public EAGLE-3 heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.models.fields import read_json
from outrider.training.eagle3 import Eagle3Head, default_feature_layers

ARCHITECTURE = "LlamaForCausalLMEagle3"

# What a head takes over from its target's config.json as it stands there.
SHARED_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
)


def export_head(head: Eagle3Head, target_folder: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write config.json and model.safetensors to `folder`, made if need be; returns the bytes of the weights.

    The embedding is the target's and is left out. Norms, matrices in `dtype`; `d2t` int64, `t2d` bool.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in head.public_state().items()
    }
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    config = head_config(head, read_json(target_folder / "config.json"), dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return path.stat().st_size


def head_config(head: Eagle3Head, target_fields: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a head."""
    target, shape = head.shape.target, head.shape
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    fields |= {name: target_fields[name] for name in SHARED_FIELDS if name in target_fields}
    if tuple(shape.feature_layers) != default_feature_layers(target.num_layers):
        # Heads name the layer whose output they take; ours are numbered by the layer that it enters.
        fields["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.feature_layers],
        }
    return fields
