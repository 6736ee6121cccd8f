"""The trainable EAGLE-1 and EAGLE-2 head (arXiv 2401.15077, 2406.16858), under the key names of public heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider_tools.training.layers import MLP_NORM, TrainableLayer, llama_fields, llama_layer, matrix
from outrider_tools.training.learner import TrainableHead, channel_sizes, levelling_weight

# Of what a new head adds to its stream, against the target's features.
START_SIZE = 0.3


class TrainableEagleHead(TrainableHead):
    """`fc` over embedding and feature, and one layer without a norm before its attention.

    The residual stream is the next hidden state itself, whose channels differ a hundredfold in some targets. What
    learns works on it divided by `feature_scale`, channel by channel; the file holds the product.
    """

    token_scale: Tensor
    feature_scale: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.feature_layers = (config.num_layers + 1,)
        self.fc = matrix(2 * hidden, hidden)
        self.layer = TrainableLayer(llama_layer(config), (MLP_NORM,))
        with torch.no_grad():
            # What a random head says with conviction costs the first steps much.
            for part in (self.fc, self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
                part.weight.mul_(START_SIZE)
        self.register_buffer("token_scale", torch.ones(hidden))
        self.register_buffer("feature_scale", torch.ones(hidden))

    @torch.no_grad()
    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """See TrainableDrafter."""
        for scale, rows in ((self.feature_scale, features), (self.token_scale, embedded)):
            scale.copy_(channel_sizes(rows))
        self.layer.post_attention_layernorm.weight.copy_(levelling_weight(self.feature_scale))

    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See TrainableHead."""
        scaled = torch.cat([embedded / self.token_scale, feature / self.feature_scale], -1)
        stream = self._grown(self.fc(scaled.to(feature.dtype)))
        return stream, (stream / self.feature_scale).to(stream.dtype)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """See TrainableHead."""
        stream = stream + self._grown(self.layer.self_attn.output(attended))
        return stream + self._grown(self.layer.mlp(self.layer.post_attention_layernorm(stream)))

    def public_state(self) -> dict[str, Tensor]:
        """See TrainableDrafter."""
        state = {name: tensor.detach() for name, tensor in self.layer.state_dict().items()}
        rows, columns = self.feature_scale[:, None], 1 / self.feature_scale[None]
        for name in ("q", "k", "v"):
            state[f"self_attn.{name}_proj.weight"] = state[f"self_attn.{name}_proj.weight"] * columns
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            state[name] = state[name] * rows
        fc = rows * self.fc.weight.detach() / torch.cat([self.token_scale, self.feature_scale])[None]
        return {"fc.weight": fc, **{f"layers.0.{name}": tensor for name, tensor in state.items()}}

    def config_fields(self, target_fields: dict[str, Any]) -> dict[str, Any]:
        """See TrainableDrafter."""
        return llama_fields(self.config, "LlamaForCausalLMEagle", target_fields)

    def _grown(self, rows: Tensor) -> Tensor:
        return (rows * self.feature_scale).to(rows.dtype)
