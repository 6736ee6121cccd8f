"""Draft heads for an inflated target: an inflated head, or one of random weights."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider.models.drafters.config import (
    EMBEDDING,
    LAYER_IDS,
    MARKOV_INPUT,
    OUTPUT,
    BlockConfig,
    HeadConfig,
    eagle3_config,
)
from outrider.models.drafters.heads import Eagle3Head
from outrider.models.drafters.kinds import algorithm_of, head_config, head_name, mtp_name
from outrider.models.drafters.loader import shared_tensors
from outrider.models.fields import read_json
from outrider.models.progress import Progress
from outrider.models.store_folder import WEIGHTS_FILE
from outrider.models.weights import StoredTensor, save_tensors, stored_tensors
from outrider_tools.files import copy_files, whole_output
from outrider_tools.inflate.folder import InflateOptions, vocab_size_of
from outrider_tools.inflate.shapes import ShapeMap, shape_of
from outrider_tools.inflate.tensors import RANDOM_STD, Axis, Inflater, inflated_fields

OFFSETS = "d2t"
WIDE = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


class HeadInflater(Inflater):
    """Makes the head's tensors one at a time, by the names that `head_name` or `mtp_name` gives them."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        config: HeadConfig,
        shape_map: ShapeMap,
        vocab_size: int,
        options: InflateOptions,
    ) -> None:
        decoder = config.decoder
        super().__init__(stored, decoder, shape_map, decoder.vocab_size, options.dtype, options.device, options.seed)
        self._wide = "layers.0.hidden_norm.weight" in stored
        self._ids = Axis.front(vocab_size, decoder.vocab_size)
        self._rows = Axis.front(config.draft_vocab_size, config.draft_vocab_size)
        feature = Axis.front(options.shape.hidden, config.target_hidden_size)
        takes_layers = self._wide or config.block is not None
        self._blocks = [feature] * len(config.feature_layers) if takes_layers else [self._residual, self._residual]
        rank = config.block.markov_rank if config.block else 0
        self._rank = Axis.front(rank, rank)

    def tensor(self, name: str) -> Tensor:
        """Return the inflated head's tensor of that name."""
        if name == EMBEDDING:
            axes = (self._ids, self._residual)
            return self._place(self._zeros(axes), name, axes)
        if name == OUTPUT:
            axes = (self._rows, self._residual)
            return self._place(self._random(name, axes), name, axes)
        if name in ("fc.weight", "input_proj.weight"):
            return self._in_blocks(name, self._residual, self._blocks)
        if name == "fc.bias":
            return self._place(self._zeros((self._residual,)), name, (self._residual,))
        if name.startswith("markov_head."):
            return self._markov(name)
        if name.endswith("norm.weight") and "self_attn" not in name:
            return self._norm(name, 0.0)
        _, number, part = name.split(".", 2)
        if self._wide and number == "0" and part in WIDE:
            rows = self._heads if "q_proj" in part else self._kv_heads
            return self._in_blocks(name, rows, [self._residual, self._residual])
        return self._projection(name, name, part.split(".")[1], is_bias=part.endswith(".bias"))

    def _markov(self, name: str) -> Tensor:
        """Return a tensor of DSPARK's sequential part. Its rank stays; other inputs are residual channels."""
        if name.endswith(("gate_proj.weight", "joint_proj.weight")):
            blocks = [self._residual, self._rank] if "gate" in name else [self._rank, self._rank, self._residual]
            count = self._stored[name].shape[0]
            return self._in_blocks(name, Axis.front(count, count), blocks)
        if name != MARKOV_INPUT:
            return self._stored[name].read().to(self._device, self._dtype)
        axes = (self._ids, self._rank)
        return self._place(self._zeros(axes), name, axes)

    def _in_blocks(self, name: str, rows: Axis, blocks: list[Axis]) -> Tensor:
        """Return a matrix whose columns belong to several inputs side by side."""
        width = sum(block.size for block in blocks)
        columns = Axis.front(width, width)
        target = self._zeros((rows, columns)) if rows is self._residual else self._random(name, (rows, columns))
        is_query = "q_proj" in name
        if is_query:
            self._clear_queries(target)
        parts = self._stored[name].read().split([len(block.places) for block in blocks], 1)
        for view, values, block in zip(target.split([block.size for block in blocks], 1), parts, blocks, strict=True):
            self._place_values(view, values, (rows, block), self._query_scale if is_query else 1.0)
        return target


def inflate_head(head: Path, target: Path, out: Path, options: InflateOptions, progress: Progress) -> int:
    """Write the head in `head` for the model that `inflate` makes of `target` with these options. Return its bytes.

    Raises ConfigError if head and target do not fit each other or the shape, or `out` cannot be written.
    """
    algorithm = algorithm_of(head)
    if algorithm == "STANDALONE":
        raise ConfigError(f"--draft {head}: holds a language model, not a head")
    of_target = ModelConfig.from_folder(target)
    fields = read_json(head / "config.json")
    stored = stored_tensors(head, mtp_name if algorithm == "NEXTN" else head_name)
    config = head_config(algorithm, head, stored, target)
    if config.norm_each or config.norm_all:
        raise ConfigError(f"cannot inflate {head}: it norms features before fc, where other channels would count")
    if algorithm == "NEXTN":
        _check_mtp(head, of_target)
        # Both are the target's, even if the module lies in the target's checkpoint.
        stored = {name: tensor for name, tensor in stored.items() if name not in (EMBEDDING, OUTPUT)}
    vocab_size = vocab_size_of(of_target, options)
    padded = vocab_size != config.decoder.vocab_size
    if padded and OUTPUT not in stored:
        raise ConfigError(f"--vocab-size: {head} uses its target's output matrix, which must not be padded then")
    if (padded or options.shape.experts) and EMBEDDING not in stored:
        # The head needs an embedding of its own: the inflated target's has channels that it must not see.
        stored = {**stored, EMBEDDING: shared_tensors(target)[EMBEDDING]}
    if algorithm == "NEXTN" and options.shape.experts:
        raise ConfigError(f"cannot inflate {head}: its layer would have experts; choose a shape without")
    shape_map = ShapeMap.of(config.decoder, replace(options.shape.dense, layers=config.decoder.num_layers))
    inflater = HeadInflater(stored, config, shape_map, vocab_size, options)
    target_map = ShapeMap.of(of_target, options.shape)
    if algorithm == "NEXTN":
        changed = inflated_fields(fields, target_map, vocab_size, inflater.rms_norm_eps, options.dtype)
    else:
        changed = _fields(fields, config, options, vocab_size, inflater.rms_norm_eps)
        if config.feature_layers[-1] <= of_target.num_layers:
            places = [*target_map.layers, options.shape.layers]
            ids = [places[layer] - 1 for layer in config.feature_layers]
            if config.block is not None:
                changed |= _block_fields(config.block, ids)
            else:
                changed["eagle_config"] = {**(changed.get("eagle_config") or {}), LAYER_IDS: ids}
    tensors: dict[str, Tensor] = {}
    stage = f"writing {out.name}"
    for count, (name, source) in enumerate(stored.items(), start=1):
        if name != OFFSETS:
            tensors[source.name] = inflater.tensor(name).cpu().contiguous()
            progress(stage, count, len(stored) + 1)
    if OFFSETS in stored:
        tensors[OFFSETS] = stored[OFFSETS].read()
    elif vocab_size != config.draft_vocab_size:
        tensors[OFFSETS] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    return save_head_folder(out, changed, tensors, head)


def _block_fields(block: BlockConfig, layer_ids: list[int]) -> dict[str, Any]:
    """Return config.json's fields for a block, always in DeepSpec's layout."""
    fields = {"block_size": block.size, "mask_token_id": block.mask_token, "target_layer_ids": layer_ids}
    markov = {"markov_rank": block.markov_rank, "markov_head_type": block.markov_kind} if block.markov_rank else {}
    return fields | markov | {"sample_from_anchor": block.from_root, "enable_confidence_head": False}


def _check_mtp(head: Path, of_target: ModelConfig) -> None:
    """Raise ConfigError if the module is another target's. Its config.json is that of its target."""
    own = ModelConfig.from_folder(head)
    if (shape_of(own), own.vocab_size) != (shape_of(of_target), of_target.vocab_size):
        raise ConfigError(
            f"--draft {head}: is for a target of {shape_of(own)} and {own.vocab_size} tokens, and this is one of "
            f"{shape_of(of_target)} and {of_target.vocab_size}"
        )


def save_head_folder(out: Path, fields: Mapping[str, Any], tensors: dict[str, Tensor], copied: Path | None) -> int:
    """Write a head's config.json and weights, and the tokenizer's files of `copied`. Return the bytes of weights."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with whole_output(out, f"--draft-out {out}", num_bytes) as work:
        work.mkdir()
        (work / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if copied is not None:
            copy_files(copied, work)
        save_tensors(tensors, work / WEIGHTS_FILE)
    return num_bytes


def _fields(
    fields: Mapping[str, Any], config: HeadConfig, options: InflateOptions, vocab_size: int, rms_norm_eps: float
) -> dict[str, Any]:
    """Return the inflated head's config.json, which is flat in any case."""
    shape = options.shape.dense
    moved = (
        "transformer_layer_config",
        "speculators_model_type",
        "speculators_config",
        LAYER_IDS,
        "dflash_config",
        "torch_dtype",
    )
    flat = {**fields, **(fields.get("transformer_layer_config") or {})}
    return {
        **{name: value for name, value in flat.items() if name not in moved},
        "architectures": fields["architectures"],
        **replace(shape, layers=config.decoder.num_layers).config_fields(),
        "target_hidden_size": shape.hidden,
        "rms_norm_eps": rms_norm_eps,
        "vocab_size": vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "dtype": str(options.dtype).removeprefix("torch."),
    }


_DRAFT_VOCAB_SIZE = 32_000


def random_eagle3_head(out: Path, source: Path, draft_vocab_size: int | None, options: InflateOptions) -> int:
    """Write a random head of one layer for the model that `inflate` makes of `source`. Return its bytes.

    The head uses its target's embedding. Its vocabulary is spread evenly over the target's; a `draft_vocab_size` of
    None stands for 32,000 tokens, or all of the target's if it has fewer.

    Raises ConfigError if the target has too few layers or tokens, or `out` exists or cannot be written.
    """
    config, shape = ModelConfig.from_folder(source), options.shape.dense
    if shape.layers < 4:
        raise ConfigError(f"an EAGLE-3 head needs a target of 4 layers or more, and it has {shape.layers}")
    vocab_size = vocab_size_of(config, options)
    size = draft_vocab_size or min(_DRAFT_VOCAB_SIZE, vocab_size)
    if size > vocab_size:
        raise ConfigError(f"--draft-vocab-size {size}: the target has {vocab_size} tokens; choose at most as many")
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **replace(shape, layers=1).config_fields(),
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": vocab_size,
        "draft_vocab_size": size,
        "eagle_config": {LAYER_IDS: [1, shape.layers // 2 - 1, shape.layers - 4], "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        "dtype": str(options.dtype).removeprefix("torch."),
    }
    head = eagle3_config(fields, ("fc.weight",), shape.layers)
    tensors: dict[str, Tensor] = {}
    for name, wanted in Eagle3Head(head, options.dtype, torch.device("meta")).checkpoint_tensors().items():
        if name == EMBEDDING:
            continue
        values = torch.ones(wanted.shape, dtype=options.dtype, device=options.device)
        if not name.endswith("norm.weight"):
            # Seed and name are hashed together: the CPU's generator takes at most 32 bits.
            generator = torch.Generator(options.device).manual_seed(zlib.crc32(f"{options.seed} {name}".encode()))
            values.normal_(0.0, RANDOM_STD, generator=generator)
        tensors[name.replace("layers.0.", "midlayer.")] = values.cpu()
    ids = torch.arange(size) * vocab_size // size
    tensors[OFFSETS] = ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return save_head_folder(out, fields, tensors, None)
