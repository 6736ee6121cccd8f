"""Checks that model and KV cache fit the device, and what both executors are measured with."""

from __future__ import annotations

from random import Random

import torch

from outrider.device import gib
from outrider.errors import ConfigError
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig, check_heads
from outrider.models.elements import model_elements
from outrider.models.transformers_model import TransformersConfig


def check_model(
    config: ModelConfig | TransformersConfig, dtype: torch.dtype, device: torch.device, mem_fraction: float
) -> None:
    """Raise ConfigError for a model that cannot run on this GPU, before its weights are read."""
    check_heads(config)
    free, total = torch.cuda.mem_get_info(device)
    budget = min(int(total * mem_fraction), free)
    count = model_elements(config).total if isinstance(config, ModelConfig) else config.num_parameters
    needed = count * dtype.itemsize - config.bytes_saved(dtype.itemsize)
    if needed > budget:
        raise ConfigError(
            f"the weights take {gib(needed)} in {str(dtype).removeprefix('torch.')}, but --mem-fraction-static "
            f"{mem_fraction} of {gib(total)}, of which {gib(free)} are free, allows {gib(budget)}; choose a smaller "
            "model or another GPU, or end what else runs on this one"
        )


def kv_tokens(model: LanguageModel, mem_fraction: float, reserve: int, beside: int = 0) -> int:
    """Tokens whose KV fits beside the loaded weights; `reserve` bytes are kept for graphs and activations.

    `beside`: bytes that a token takes beside its KV.
    """
    per_token = model.kv_bytes + beside
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    room = free - int(total * (1 - mem_fraction)) - reserve
    if room < 1024 * per_token:
        raise ConfigError(
            f"--mem-fraction-static: {mem_fraction} of {gib(total)} leaves {max(room, 0) / 2**30:.2f} GiB for KV, too "
            f"little for 1024 tokens of {per_token / 1024:.0f} KiB; raise it (at most 0.98) or choose a smaller model"
        )
    return room // per_token


def varied_tokens(count: int, vocab_size: int) -> list[int]:
    """Token ids to measure forwards with: at random, for copies of one token would wake the same few experts."""
    return Random(0).choices(range(vocab_size), k=count)
