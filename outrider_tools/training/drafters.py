"""The drafters that can be trained: how each begins, and how it is written as a folder in the layout of public ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.config.draft import BLOCK_ALGORITHMS
from outrider.errors import ConfigError
from outrider.models.config import ModelConfig
from outrider.models.fields import read_json
from outrider.models.weights import save_tensors
from outrider_tools.files import copy_files, replacing
from outrider_tools.inflate.shapes import decoder_fields
from outrider_tools.training.block import TrainableBlockHead
from outrider_tools.training.heads import (
    StoredEagle3Head,
    TrainableEagle3Head,
    TrainableEagleHead,
    TrainableMtpHead,
    default_feature_layers,
)
from outrider_tools.training.learner import Learner, TrainableDrafter
from outrider_tools.training.options import FLAGS, RunOptions
from outrider_tools.training.standalone import TrainableLM, small_config
from outrider_tools.training.target import TargetModel
from outrider_tools.training.texts import Texts, choose_vocabulary

DRAFT_VOCAB_SIZE = 8192


def make_learner(target: TargetModel, texts: Texts, options: RunOptions) -> Learner:
    """The untrained drafter that `options.algorithm` names, on the target's device; the same for the same options and
    texts.

    Raises ConfigError: the target or the sizes do not allow it.
    """
    torch.manual_seed(options.trainer.seed)
    module = MAKERS[options.algorithm](target, texts, options).to(target.device)
    return Learner(target, module, options.trainer, options.feature_weight)


def _eagle3(target: TargetModel, texts: Texts, options: RunOptions) -> TrainableDrafter:
    if options.init_from is not None:
        return StoredEagle3Head(options.init_from, target.config).head(target)
    config = target.config
    chosen = choose_vocabulary(texts, config.vocab_size, options.draft_vocab_size, config.eos_token_ids)
    layers = _feature_layers(options, config)
    head = TrainableEagle3Head(config, torch.from_numpy(chosen), layers, options.intermediate_size)
    head.start(target)
    return head


def _block(target: TargetModel, texts: Texts, options: RunOptions) -> TrainableDrafter:
    config = target.config
    chosen = choose_vocabulary(texts, config.vocab_size, options.draft_vocab_size, config.eos_token_ids)
    # The mask is a token that is never guessed; what it was to the target does not matter.
    unknown = np.setdiff1d(np.arange(config.vocab_size), chosen)
    head = TrainableBlockHead(
        config,
        torch.from_numpy(chosen),
        _feature_layers(options, config),
        block_size=options.trainer.unroll,
        num_layers=options.layers,
        mlp_size=options.intermediate_size or config.intermediate_size,
        mask_token=int(unknown[-1]) if unknown.size else config.vocab_size - 1,
        markov_rank=options.markov_rank if options.algorithm == "DSPARK" else 0,
    )
    head.start(target)
    return head


def _feature_layers(options: RunOptions, config: ModelConfig) -> tuple[int, ...]:
    for layer in options.feature_layers:
        if not 0 <= layer <= config.num_layers:
            limit = f"the target has {config.num_layers} layers; choose from 0 to {config.num_layers}"
            raise ConfigError(f"--feature-layers {layer}: {limit}, its output")
    if options.feature_layers:
        return options.feature_layers
    if config.num_layers < 4:
        raise ConfigError(f"--feature-layers: must be given for a target of {config.num_layers} layers")
    return default_feature_layers(config.num_layers)


def _standalone(target: TargetModel, texts: Texts, options: RunOptions) -> TrainableDrafter:
    model = TrainableLM(small_config(target.config, options.layers, options.hidden))
    model.start(target)
    return model


MAKERS: dict[str, Callable[[TargetModel, Texts, RunOptions], TrainableDrafter]] = {
    "EAGLE3": _eagle3,
    **dict.fromkeys(BLOCK_ALGORITHMS, _block),
    "EAGLE": lambda target, texts, options: TrainableEagleHead(target.config),
    "NEXTN": lambda target, texts, options: TrainableMtpHead(target.config),
    "STANDALONE": _standalone,
}


_OWN_VOCABULARY = ("EAGLE3", *BLOCK_ALGORITHMS)
_KINDS: dict[str, tuple[str, ...]] = {
    "init_from": ("EAGLE3",),
    "hit_weight": ("EAGLE3",),
    "draft_vocab_size": _OWN_VOCABULARY,
    "intermediate_size": _OWN_VOCABULARY,
    "feature_layers": _OWN_VOCABULARY,
    "own_feature_weight": ("EAGLE", "NEXTN"),
    "layers": ("STANDALONE", *BLOCK_ALGORITHMS),
    "markov_rank": ("DSPARK",),
    "hidden": ("STANDALONE",),
}
"""The drafters that an option is for; the others do not read it."""


def _check_kinds(options: RunOptions) -> None:
    """Raise ConfigError for an option of other drafters."""
    for name, kinds in _KINDS.items():
        of = options if hasattr(options, name) else options.trainer
        value, default = getattr(of, name), getattr(type(of)(), name)
        if value and value != default and options.algorithm not in kinds:
            flag = FLAGS.get(name, name).replace("_", "-")
            given = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise ConfigError(
                f"--{flag} {given}: is for --algorithm {' or '.join(kinds)}, not {options.algorithm}; leave it out"
            )


def resolved(options: RunOptions, target: ModelConfig) -> RunOptions:
    """Options with sizes in place of those that were not given: the initial head's, or the default.

    Raises ConfigError: the target or the initial head does not allow a size, or another kind is trained.
    """
    _check_kinds(options)
    if options.algorithm in BLOCK_ALGORITHMS and options.trainer.unroll < 2:
        raise ConfigError(f"--unroll {options.trainer.unroll}: a block has at least 2 places")
    options = replace(options, layers=options.layers or (2 if options.algorithm in BLOCK_ALGORITHMS else 4))
    if options.init_from is None:
        size = options.draft_vocab_size or min(DRAFT_VOCAB_SIZE, target.vocab_size)
        if options.algorithm == "STANDALONE":
            small_config(target, options.layers, options.hidden)
        elif options.algorithm in ("EAGLE3", *BLOCK_ALGORITHMS):
            _feature_layers(options, target)
            if size > target.vocab_size:
                limit = f"the target has {target.vocab_size} tokens; choose at most as many"
                raise ConfigError(f"--draft-vocab-size {size}: {limit}")
        return replace(options, draft_vocab_size=size)
    head = StoredEagle3Head(options.init_from, target).config
    sizes: dict[str, Any] = {
        "draft_vocab_size": head.draft_vocab_size,
        "intermediate_size": head.decoder.intermediate_size,
        "feature_layers": head.feature_layers,
    }
    for name, own in sizes.items():
        given = getattr(options, name)
        if given and given != own:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {given}: the head of --init-from has {own}; leave the option out")
    return replace(options, **sizes)


def export_drafter(
    module: TrainableDrafter, target_folder: Path, folder: Path, dtype: torch.dtype = torch.bfloat16, window: int = 0
) -> int:
    """Write a drafter to `folder`, made if need be; returns the bytes of its weights.

    A head's embedding is the target's and is left out, and so is the output matrix of an EAGLE head or MTP module. A
    language model gets the target's tokenizer. Norms and matrices in `dtype`; of heads with a vocabulary of their own
    `d2t` int64, `t2d` bool.

    `window`: last tokens that a head is shown of long contexts when it is used, since it was trained on short ones; 0
    for all.
    """
    fields = module.config_fields(decoder_fields(read_json(target_folder / "config.json")))
    # Both are ways to say it; the newer one would win over what we write.
    fields.pop("dtype", None)
    if window:
        fields["draft_window_size"] = window
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in module.public_state().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(module, TrainableLM):
        copy_files(target_folder, folder)
    path = folder / "model.safetensors"
    with replacing(path) as part:
        save_tensors(tensors, part)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    return path.stat().st_size
