"""Loads a model from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.config import FAMILIES, ModelConfig
from outrider.models.decoder import CausalLM
from outrider.models.shards import shard_paths, tensor_shapes
from outrider.models.weights import open_shard

Progress = Callable[[int, int], None]

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> CausalLM:
    """Load a Hugging Face folder: config.json and safetensors, in one file or sharded.

    Names and shapes of all tensors are checked before memory is taken for weights; then they go tensor by tensor to
    `dtype` and `device`. `progress(done_bytes, total_bytes)` is called from this thread as they do.

    Raises:
        ConfigError: names the architecture, field, file or tensor that is at fault.
    """
    folder = Path(path)
    config = ModelConfig.from_folder(folder)
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(f"dtype {dtype} is not supported; choose one of {', '.join(map(str, SUPPORTED_DTYPES))}")
    shards = shard_paths(folder)
    # The meta device gives names and shapes without memory.
    expected = CausalLM(config, dtype, torch.device("meta")).checkpoint_tensors()
    optional = {"lm_head.weight": expected["model.embed_tokens.weight"]} if config.tie_embeddings else {}
    _check_tensors(shards, expected, optional, FAMILIES[config.architecture].unread_prefix)
    with torch.inference_mode():
        model = CausalLM(config, dtype, torch.device(device))
        _fill(model.checkpoint_tensors(), shards, progress)
        model.finish_loading()
    return model


def _check_tensors(
    shards: list[Path], expected: Mapping[str, Tensor], optional: Mapping[str, Tensor], unread: str | None
) -> None:
    found: set[str] = set()
    for shard in shards:
        for name, shape in tensor_shapes(shard).items():
            if _is_derived(name) or (unread is not None and name.startswith(unread)):
                continue
            wanted = expected.get(name, optional.get(name))
            if wanted is None:
                raise ConfigError(f"{shard}: unexpected tensor {name}; config.json does not call for it")
            if name in found:
                raise ConfigError(f"{shard}: tensor {name} is in two shards")
            if shape != tuple(wanted.shape):
                raise ConfigError(
                    f"{shard}: tensor {name} has shape {list(shape)}, config.json calls for {list(wanted.shape)}"
                )
            found.add(name)
    missing = sorted(expected.keys() - found)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{shards[0].parent}: tensor {missing[0]}{more} missing from the checkpoint")


def _is_derived(name: str) -> bool:
    """Old Llama checkpoints carry their rotary frequencies, which follow from config.json."""
    return name.endswith(".rotary_emb.inv_freq")


def _fill(targets: Mapping[str, Tensor], shards: list[Path], progress: Progress | None) -> None:
    total = sum(shard.stat().st_size for shard in shards)
    done = 0
    for path in shards:
        end = done + path.stat().st_size
        with open_shard(path) as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if name in targets:
                    tensor = shard.get_tensor(name)
                    targets[name].copy_(tensor)
                    done += tensor.nbytes
                    if progress is not None:
                        progress(done, total)
        done = end  # headers and skipped tensors
        if progress is not None:
            progress(done, total)
