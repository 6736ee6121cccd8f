"""A small language model that learns to speak as the target does, from the target's own layers where they fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider_tools.inflate.shapes import shape_of
from outrider_tools.training.attention import OwnKeyMerger, Spans, own_attention
from outrider_tools.training.layers import TrainableLayer, TrainableNorm, matrix
from outrider_tools.training.learner import DraftInput, Runner, TrainableDrafter, Wrap
from outrider_tools.training.target import EMBEDDING, TargetModel


def small_config(target: ModelConfig, num_layers: int, hidden_size: int) -> ModelConfig:
    """The target's shape with fewer layers and, if `hidden_size` is not 0, narrower; heads keep their size.

    Raises ConfigError: a hidden size that is no multiple of the heads' size, or a target of which no small model can
    be made.
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
    # As many queries for a key head as the target has, where that divides.
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
    """A decoder-only language model under Hugging Face's names, without their leading `model.`. It has no features to
    run ahead on, so it learns from one step."""

    lead = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
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
        """Hidden states [M, hidden] after the last norm, of sequences one after the other, int64 [M]."""
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
        """See TrainableDrafter: the target's, with the small model's sizes."""
        fields = {**target_fields, **shape_of(self.config).config_fields()}
        # Lists with an entry a layer are the target's and fit no longer, and the small model has no MTP modules.
        lacking = ("layer_types", "num_nextn_predict_layers")
        return {name: value for name, value in fields.items() if name not in lacking}

    @torch.no_grad()
    def start(self, target: TargetModel) -> None:
        """Begin with the target's own weights.

        Of the same width: embedding, output matrix, last norm, and layers spread over the target's from its first to
        its last. Narrower: the embedding's (and output matrix's) main directions; the rest stays random.
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
    """[hidden, count]: the directions that most of the embedding lies in, the first ones first."""
    found: Tensor = torch.linalg.eigh(embedding.t() @ embedding).eigenvectors
    return found[:, -count:].flip(1)
