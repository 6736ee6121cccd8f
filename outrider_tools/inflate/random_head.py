"""EAGLE-3 heads of random weights: what a useless draft costs."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider.models.drafters.base import EMBEDDING
from outrider.models.drafters.config import LAYER_IDS, eagle3_config
from outrider.models.drafters.heads import Eagle3Head
from outrider_tools.inflate.folder import InflateOptions
from outrider_tools.inflate.head import OFFSETS, save_head_folder
from outrider_tools.inflate.tensors import RANDOM_STD


def random_eagle3_head(
    folder: Path,
    target: ModelConfig,
    draft_vocab_size: int = 32000,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> int:
    """Write a head of the target's shape, with one layer and the target's embedding; returns its bytes.

    Its vocabulary is spread evenly over the target's, or the target's own if that is no larger.

    Raises:
        ConfigError: the target has too few layers, or `folder` exists or cannot be written.
    """
    if target.num_layers < 4:
        raise ConfigError(f"an EAGLE-3 head needs a target of 4 layers or more, and it has {target.num_layers}")
    device = device or torch.device("cpu")
    size = min(draft_vocab_size, target.vocab_size)
    fields = _fields(target, size, dtype)
    config = eagle3_config(fields, ("fc.weight",), target.num_layers)
    tensors: dict[str, Tensor] = {}
    for name, shape in Eagle3Head(config, dtype, torch.device("meta")).checkpoint_tensors().items():
        if name == EMBEDDING:
            continue
        values = torch.ones(shape.shape, dtype=dtype, device=device)
        if not name.endswith("norm.weight"):
            # Hashed together: the CPU's generator takes no more than 32 bits.
            generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            values.normal_(0.0, RANDOM_STD, generator=generator)
        tensors[name.replace("layers.0.", "midlayer.")] = values.cpu()
    ids = torch.arange(size) * target.vocab_size // size
    tensors[OFFSETS] = ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return save_head_folder(folder, fields, tensors, None)


def shaped(source: Path, options: InflateOptions) -> ModelConfig:
    """The configuration of what `inflate` makes of `source`, as far as a head needs it."""
    config, shape = ModelConfig.from_folder(source), options.shape
    return replace(
        config,
        vocab_size=options.vocab_size or config.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )


def _fields(target: ModelConfig, draft_vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    count = target.num_layers
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "eagle_config": {LAYER_IDS: [1, count // 2 - 1, count - 4], "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
