"""A small language model that learns to speak as the target does, from the target's own layers where they fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider.models.weights import TensorReader
from outrider_tools.training.decoder import Layer, Norm, matrix
from outrider_tools.training.dense import target_states
from outrider_tools.training.feature_learner import groups_of, output_matrix
from outrider_tools.training.loss import soft_cross_entropy, wanted_at
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.padded import on_device
from outrider_tools.training.target import Target
from outrider_tools.training.texts import TextBatch


def small_config(target: ModelConfig, num_layers: int, hidden_size: int) -> ModelConfig:
    """The target's shape with fewer layers and, if `hidden_size` is not 0, narrower; heads keep their size.

    Raises:
        ConfigError: a hidden size that is no multiple of the heads' size.
    """
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


class SmallModel(nn.Module):
    """A decoder-only language model under Hugging Face's names, without their leading `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else matrix(config.hidden_size, config.vocab_size)

    @property
    def output(self) -> Tensor:
        """[vocabulary, hidden]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, token_ids: Tensor, rotary: Rotary) -> Tensor:
        """Hidden states [B, T, hidden] after the last norm, of padded sequences int64 [B, T]."""
        stream = self.embed_tokens(token_ids)
        if torch.is_autocast_enabled(token_ids.device.type):
            stream = stream.to(torch.get_autocast_dtype(token_ids.device.type))
        angles = rotary.angles(torch.arange(token_ids.shape[1], device=token_ids.device), stream.dtype)
        for layer in self.layers:
            stream = layer(stream, angles)
        rows: Tensor = self.norm(stream)
        return rows

    def public_state(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by their public names."""
        return {
            name if name.startswith("lm_head.") else f"model.{name}": tensor.detach()
            for name, tensor in self.state_dict().items()
        }


@torch.no_grad()
def start_small_model(model: SmallModel, target: Target) -> None:
    """Begin with the target's own weights.

    Of the same width: embedding, output matrix, last norm, and layers spread over the target's from its first to its
    last. Narrower: the embedding's (and output matrix's) main directions; the rest stays random.
    """
    config = target.config
    same = model.config.hidden_size == config.hidden_size
    with TensorReader(target.folder) as reader:
        embedding = reader.tensor("model.embed_tokens.weight").float()
        directions = None if same else _directions(embedding, model.config.hidden_size)
        model.embed_tokens.weight.copy_(embedding if directions is None else embedding @ directions)
        if model.lm_head is not None:
            output = output_matrix(target).float()
            model.lm_head.weight.copy_(output if directions is None else output @ directions)
        if not same:
            return
        model.norm.weight.copy_(reader.tensor("model.norm.weight").float())
        chosen = torch.linspace(0, config.num_layers - 1, model.config.num_layers).round().long().tolist()
        for layer, number in zip(model.layers, chosen, strict=True):
            for name, parameter in layer.named_parameters():
                parameter.copy_(reader.tensor(f"model.layers.{number}.{name}").float())


def _directions(embedding: Tensor, count: int) -> Tensor:
    """[hidden, count]: the directions that most of the embedding lies in, the first ones first."""
    found: Tensor = torch.linalg.eigh(embedding.t() @ embedding).eigenvectors
    return found[:, -count:].flip(1)


class StandaloneLearner:
    """See Learner. One step: a language model has no features to run ahead on."""

    module: nn.Module
    packed = False

    def __init__(self, target: Target, model: SmallModel) -> None:
        self.module = self._model = model
        self._target = target
        self._rotary = Rotary(model.config.rope, model.config.head_dim, target.device)
        self._ids = torch.arange(target.config.vocab_size, device=target.device)

    def prepare(self, batch: TextBatch) -> None:
        """See Learner."""

    def losses(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """See Learner."""
        target = self._target
        token_ids, places = on_device(batch, target.device)
        _, hidden = target_states(target.model, token_ids, (0,))
        wanted = wanted_at(target.model, hidden.flatten(0, 1).index_select(0, places), self._ids, self._ids)
        with target.autocast():
            rows = self._model(token_ids, self._rotary).flatten(0, 1).index_select(0, places)
            loss, hits = soft_cross_entropy(rows, self._model.output, wanted)
        return loss.unsqueeze(0), hits.float().mean().unsqueeze(0)

    def groups(self, options: TrainerOptions) -> list[dict[str, Any]]:
        """See Learner. Embedding and output matrix begin as the target's own, and so move less."""
        model, peak = self._model, options.learning_rate
        given = [model.embed_tokens.weight]
        if model.lm_head is not None:
            given.append(model.lm_head.weight)
        own = {id(parameter) for parameter in given}
        new = [parameter for parameter in model.parameters() if id(parameter) not in own]
        first = {"params": given, "peak": peak * options.output_share, "kind": "other"}
        return [*groups_of(new, peak), first]


def small_fields(config: ModelConfig, target_fields: dict[str, Any]) -> dict[str, Any]:
    """config.json: the target's, with the small model's sizes."""
    fields = {
        **target_fields,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    # Lists with an entry a layer are the target's and fit no longer; so are modules that the small model has not got.
    return {name: value for name, value in fields.items() if name not in ("layer_types", "num_nextn_predict_layers")}
