"""Trained drafters as folders in the layouts of public ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.config import read_json
from outrider_tools.training.eagle import EagleHead, eagle_fields
from outrider_tools.training.eagle3 import Eagle3Head, default_feature_layers
from outrider_tools.training.mtp import MtpHead, mtp_fields
from outrider_tools.training.standalone import SmallModel, small_fields

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
# What makes a folder a language model of its own, beside config and weights.
MODEL_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

Drafter = Eagle3Head | EagleHead | MtpHead | SmallModel


def export_drafter(module: Drafter, target_folder: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write a drafter to `folder`, made if need be; returns the bytes of its weights.

    A head's embedding (and, but for EAGLE-3, output matrix) is the target's and is left out. A language model gets the
    target's tokenizer. Norms and matrices in `dtype`; of EAGLE-3 heads `d2t` int64, `t2d` bool.
    """
    target_fields = read_json(target_folder / "config.json")
    if isinstance(module, Eagle3Head):
        fields = head_config(module, target_fields, dtype)
    elif isinstance(module, EagleHead):
        shared = {name: target_fields[name] for name in SHARED_FIELDS if name in target_fields}
        fields = eagle_fields(module.config, shared)
    elif isinstance(module, MtpHead):
        fields = mtp_fields(target_fields)
    else:
        fields = small_fields(module.config, target_fields)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(module, SmallModel):
        for name in MODEL_FILES:
            if (target_folder / name).is_file():
                shutil.copyfile(target_folder / name, folder / name)
    # Both are ways to say it; the newer one would win over what we write.
    fields.pop("dtype", None)
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    return _write(folder, module.public_state(), fields, dtype)


def head_config(head: Eagle3Head, target_fields: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of an EAGLE-3 head."""
    target, shape = head.shape.target, head.shape
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.mlp_size,
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


def _write(folder: Path, tensors: dict[str, Tensor], fields: dict[str, Any], dtype: torch.dtype) -> int:
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    path = folder / "model.safetensors"
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, path)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    return path.stat().st_size
