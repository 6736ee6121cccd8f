"""The trainable multi-token prediction module, in the layout of MiMo checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.drafters.loader import MTP_PREFIX
from outrider_tools.training.channels import channel_sizes, levelling_weight
from outrider_tools.training.decoder import Layer, Norm, matrix
from outrider_tools.training.feature_head import FeatureHead


class MtpHead(FeatureHead):
    """`input_proj` over the normed feature and the normed embedding, a layer like the target's, and a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Norm(hidden, eps)
        self.hidden_layernorm = Norm(hidden, eps)
        self.input_proj = matrix(2 * hidden, hidden)
        self.layer = Layer(config)
        self.final_layernorm = Norm(hidden, eps)

    @torch.no_grad()
    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """See FeatureHead. Norms of inputs begin where all channels come out alike, the last one at their sizes."""
        for norm, rows in ((self.hidden_layernorm, features), (self.token_layernorm, embedded)):
            norm.weight.copy_(levelling_weight(channel_sizes(rows)))
        self.final_layernorm.weight.copy_(channel_sizes(features, least=0.0))

    def enter(self, embedded: Tensor, feature: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        """See FeatureHead."""
        tokens = self.token_layernorm(embedded)
        if first:
            # The first pair of a sequence has no token, as in the engines that serve this head.
            tokens = tokens.masked_fill(torch.arange(tokens.shape[1], device=tokens.device)[:, None] == 0, 0.0)
        stream: Tensor = self.input_proj(torch.cat([self.hidden_layernorm(feature), tokens], -1))
        return stream, self.layer.input_layernorm(stream)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """See FeatureHead."""
        output: Tensor = self.final_layernorm(self.layer.finish(stream, attended))
        return output

    def public_state(self) -> dict[str, Tensor]:
        """See FeatureHead."""
        state = {name.removeprefix("layer."): tensor.detach() for name, tensor in self.state_dict().items()}
        return {MTP_PREFIX + name: tensor for name, tensor in state.items()}


def mtp_fields(target_fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of a module in a folder of its own: its target's, and how many modules there are."""
    return {**target_fields, "num_nextn_predict_layers": 1}
