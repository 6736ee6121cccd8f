"""The drafters that can be trained: how each begins, and how its folder is written in the layout of public ones.

One of them is a small language model, which begins with the target's own layers if they fit. Heads are in `heads`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from outrider.config.draft import BLOCK_ALGORITHMS
from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider.models.drafters.config import OUTPUT, default_feature_layers
from outrider.models.fields import read_json
from outrider.models.weights import save_tensors
from outrider_tools.compensate import compensated
from outrider_tools.files import copy_files, replacing
from outrider_tools.inflate.shapes import decoder_fields, shape_of
from outrider_tools.quantize import nearest_e4m3
from outrider_tools.training.attention import OwnKeyMerger, Spans, own_attention
from outrider_tools.training.heads import (
    StoredEagle3Head,
    TrainableBlockHead,
    TrainableEagle3Head,
    TrainableEagleHead,
    TrainableMtpHead,
)
from outrider_tools.training.layers import TrainableLayer, TrainableNorm, matrix
from outrider_tools.training.learner import DraftInput, Learner, Runner, TrainableDrafter, Wrap
from outrider_tools.training.options import FLAGS, RunOptions
from outrider_tools.training.target import EMBEDDING, TargetModel
from outrider_tools.training.texts import TextBatch, Texts, choose_vocabulary


def small_config(target: ModelConfig, num_layers: int, hidden_size: int) -> ModelConfig:
    """Return the target's shape with fewer layers and, if `hidden_size` is not 0, narrower; heads keep their size.

    Raises ConfigError if the hidden size is not a multiple of the head size, or no small model can be made of the
    target.
    """
    if target.quantization is not None or target.experts is not None:
        what = "experts" if target.quantization is None else f"{target.quantization.name} weights"
        raise ConfigError(
            f"--algorithm STANDALONE: begins with layers of the target, and this one has {what}; give one of half "
            "precision without experts, or train a head"
        )
    if not 1 <= num_layers <= target.num_layers:
        raise ConfigError(f"--layers {num_layers}: the target has {target.num_layers}; choose from 1 to that")
    hidden_size = hidden_size or target.hidden_size
    if hidden_size == target.hidden_size:
        return replace(target, num_layers=num_layers)
    if hidden_size % target.head_dim:
        raise ConfigError(f"--hidden {hidden_size}: must be a multiple of the head size {target.head_dim}")
    num_heads = hidden_size // target.head_dim
    # As many queries for each key head as in the target, if that divides.
    group = target.num_heads // target.num_kv_heads
    return replace(
        target,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=max(1, round(target.intermediate_size * hidden_size / target.hidden_size / 64)) * 64,
        num_heads=num_heads,
        num_kv_heads=num_heads // group if num_heads % group == 0 else num_heads,
    )


class TrainableLM(TrainableDrafter):
    """A decoder-only language model under Hugging Face's names, without their leading `model.`. It learns from one step
    only, since it has no features to run ahead on."""

    lead = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TrainableLayer(config) for _ in range(config.num_layers))
        self.norm = TrainableNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else matrix(config.hidden_size, config.vocab_size)

    @property
    def output_weight(self) -> Tensor:
        """See TrainableDrafter."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def inherited(self) -> list[Tensor]:
        """See TrainableDrafter: embedding and output matrix."""
        return [self.embed_tokens.weight, *([] if self.lm_head is None else [self.lm_head.weight])]

    def runner(self, rotary: Rotary, wrap: Wrap) -> Runner:
        """See TrainableDrafter."""

        def run(given: DraftInput, num_steps: int) -> Iterator[Tensor]:
            yield self(given.token_ids, given.spans, rotary)

        return run

    def forward(self, token_ids: Tensor, spans: Spans, rotary: Rotary) -> Tensor:
        """Return hidden states [M, hidden] after the last norm, for the token ids of packed sequences, int64 [M]."""
        stream = self.embed_tokens(token_ids)
        if torch.is_autocast_enabled(token_ids.device.type):
            stream = stream.to(torch.get_autocast_dtype(token_ids.device.type))
        angles = rotary.angles(spans.positions, stream.dtype)
        nothing = OwnKeyMerger(lambda piece: piece)
        for layer in cast(Iterable[TrainableLayer], self.layers):
            q, k, v = layer.project(stream, *angles)
            stream = layer.finish(stream, own_attention(q, k, v, [], [], spans, nothing))
        rows: Tensor = self.norm(stream)
        return rows

    def public_state(self) -> dict[str, Tensor]:
        """See TrainableDrafter."""
        return {
            name if name.startswith("lm_head.") else f"model.{name}": tensor.detach()
            for name, tensor in self.state_dict().items()
        }

    def config_fields(self, target_fields: dict[str, Any]) -> dict[str, Any]:
        """See TrainableDrafter. Starts from the target's fields, with the small model's sizes."""
        fields = {**target_fields, **shape_of(self.config).config_fields()}
        # The target's lists with an entry for each layer no longer fit, and the small model has no MTP modules.
        lacking = ("layer_types", "num_nextn_predict_layers")
        return {name: value for name, value in fields.items() if name not in lacking}

    @torch.no_grad()
    def start(self, target: TargetModel) -> None:
        """Begin with the target's own weights.

        With the same width, take embedding, output matrix, last norm, and layers spread evenly from the target's first
        to its last. If narrower, take the main directions of embedding and output matrix; the rest stays random.
        """
        config = target.config
        same = self.config.hidden_size == config.hidden_size
        embedding = target.stored(EMBEDDING).float()
        directions = None if same else _directions(embedding, self.config.hidden_size)
        self.embed_tokens.weight.copy_(embedding if directions is None else embedding @ directions)
        if self.lm_head is not None:
            output = target.stored_output().float()
            self.lm_head.weight.copy_(output if directions is None else output @ directions)
        if not same:
            return
        self.norm.weight.copy_(target.stored("model.norm.weight").float())
        chosen = torch.linspace(0, config.num_layers - 1, self.config.num_layers).round().long().tolist()
        stored = target.tensors()
        for layer, number in zip(self.layers, chosen, strict=True):
            for name, parameter in layer.named_parameters():
                parameter.copy_(stored[f"model.layers.{number}.{name}"].read().float())


def _directions(embedding: Tensor, count: int) -> Tensor:
    """Return the `count` main directions of an embedding, [hidden, count], in descending order."""
    found: Tensor = torch.linalg.eigh(embedding.t() @ embedding).eigenvectors
    return found[:, -count:].flip(1)


DRAFT_VOCAB_SIZE = 8192


def make_learner(target: TargetModel, texts: Texts, options: RunOptions) -> Learner:
    """Make the untrained drafter that `options.algorithm` names, on the target's device. The same options and texts
    give the same drafter.

    Raises ConfigError if the target or the sizes do not allow it.
    """
    torch.manual_seed(options.trainer.seed)
    module = MAKERS[options.algorithm](target, texts, options).to(target.device)
    return Learner(target, module, options.trainer, options.feature_weight)


def _eagle3(target: TargetModel, texts: Texts, options: RunOptions) -> TrainableDrafter:
    config = target.config
    stored = None if options.init_from is None else StoredEagle3Head(options.init_from, config)
    always = config.eos_token_ids if stored is None else stored.target_ids.tolist()
    chosen = choose_vocabulary(texts, config.vocab_size, options.draft_vocab_size, always)
    if stored is not None:
        return stored.head(target, torch.from_numpy(chosen))
    layers = _feature_layers(options, config)
    head = TrainableEagle3Head(config, torch.from_numpy(chosen), layers, options.intermediate_size)
    head.start(target)
    return head


def _block(target: TargetModel, texts: Texts, options: RunOptions) -> TrainableDrafter:
    config = target.config
    chosen = choose_vocabulary(texts, config.vocab_size, options.draft_vocab_size, config.eos_token_ids)
    # The mask is a token that is never guessed; its meaning for the target does not matter.
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
    "output_dtype": ("EAGLE3",),
    "intermediate_size": _OWN_VOCABULARY,
    "feature_layers": _OWN_VOCABULARY,
    "own_feature_weight": ("EAGLE", "NEXTN"),
    "layers": ("STANDALONE", *BLOCK_ALGORITHMS),
    "markov_rank": ("DSPARK",),
    "hidden": ("STANDALONE",),
}
"""The drafters that read each option; the others ignore it."""


def _check_kinds(options: RunOptions) -> None:
    """Raise ConfigError if an option is set that belongs to other drafters."""
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
    """Return the options with missing sizes filled in, from the initial head or by default.

    Raises ConfigError if the target or the initial head does not allow a size, or an option belongs to other drafters.
    """
    _check_kinds(options)
    if options.algorithm in BLOCK_ALGORITHMS and options.trainer.unroll < 2:
        raise ConfigError(f"--unroll {options.trainer.unroll}: a block has at least 2 places")
    options = replace(options, layers=options.layers or (2 if options.algorithm in BLOCK_ALGORITHMS else 4))
    head = None if options.init_from is None else StoredEagle3Head(options.init_from, target).config
    default = min(DRAFT_VOCAB_SIZE, target.vocab_size) if head is None else head.draft_vocab_size
    size = options.draft_vocab_size or default
    if options.algorithm in _OWN_VOCABULARY and size > target.vocab_size:
        limit = f"the target has {target.vocab_size} tokens; choose at most as many"
        raise ConfigError(f"--draft-vocab-size {size}: {limit}")
    options = replace(options, draft_vocab_size=size)
    if head is None:
        if options.algorithm == "STANDALONE":
            small_config(target, options.layers, options.hidden)
        elif options.algorithm in _OWN_VOCABULARY:
            _feature_layers(options, target)
        return options
    if size < head.draft_vocab_size:
        least = f"the head of --init-from has {head.draft_vocab_size}; choose at least as many, or leave the option out"
        raise ConfigError(f"--draft-vocab-size {size}: {least}")
    sizes = {"intermediate_size": head.decoder.intermediate_size, "feature_layers": head.feature_layers}
    for name, own in sizes.items():
        given = getattr(options, name)
        if given and given != own:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {given}: the head of --init-from has {own}; leave the option out")
    return replace(options, intermediate_size=head.decoder.intermediate_size, feature_layers=head.feature_layers)


@torch.no_grad()
def round_output(learner: Learner, batch: TextBatch) -> None:
    """Round a head's output matrix to float8_e4m3, so that its products with the batch's rows change least."""
    weight = learner.module.output_weight
    assert weight is not None, "EAGLE-3 heads have one"
    moments = learner.output_moments(batch)
    weight.copy_(compensated(weight.float(), moments, torch.ones_like(weight), nearest_e4m3))


def export_drafter(
    module: TrainableDrafter,
    target_folder: Path,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    output_dtype: torch.dtype | None = None,
) -> int:
    """Write a drafter to `folder`, which is made if missing. Return the bytes of its weights.

    A head's embedding is left out, since it is the target's; so is the output matrix of an EAGLE head or MTP module. A
    language model gets the target's tokenizer. Norms and matrices are stored in `dtype`, an output matrix in
    `output_dtype` if that is given; heads with a vocabulary of their own have `d2t` int64 and `t2d` bool.

    `window` limits a head to that many last tokens of long contexts in use, because it was trained on short ones; 0 for
    no limit.
    """
    fields = module.config_fields(decoder_fields(read_json(target_folder / "config.json")))
    # "dtype" and "torch_dtype" mean the same; the newer name would override ours.
    fields.pop("dtype", None)
    if window:
        fields["draft_window_size"] = window
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    dtypes = {OUTPUT: output_dtype or dtype}
    tensors = {
        name: (tensor.to(dtypes.get(name, dtype)) if tensor.is_floating_point() else tensor).cpu().contiguous()
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
