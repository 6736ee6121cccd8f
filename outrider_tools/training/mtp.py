"""The trainable multi-token prediction module, in the layout of MiMo checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.drafters.kinds import MTP_PREFIX
from outrider_tools.training.layers import TrainableLayer, TrainableNorm, matrix
from outrider_tools.training.learner import TrainableHead, channel_sizes, levelling_weight


class TrainableMtpHead(TrainableHead):
    """`input_proj` over the normed feature and the normed embedding, a layer like the target's, and a norm.

    What it computes stands in the place of the next hidden state. The first pair of a sequence has no token, as in the
    engines that serve this head.
    """

    skips_first_token = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.feature_layers = (config.num_layers + 1,)
        self.token_layernorm = TrainableNorm(hidden, eps)
        self.hidden_layernorm = TrainableNorm(hidden, eps)
        self.input_proj = matrix(2 * hidden, hidden)
        self.layer = TrainableLayer(config)
        self.final_layernorm = TrainableNorm(hidden, eps)

    @torch.no_grad()
    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """See TrainableDrafter. Input norms begin where all channels come out alike, the last one at their sizes."""
        for norm, rows in ((self.hidden_layernorm, features), (self.token_layernorm, embedded)):
            norm.weight.copy_(levelling_weight(channel_sizes(rows)))
        self.final_layernorm.weight.copy_(channel_sizes(features, least=0.0))

    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See TrainableHead."""
        inputs = torch.cat([self.hidden_layernorm(feature), self.token_layernorm(embedded)], -1)
        stream: Tensor = self.input_proj(inputs)
        return stream, self.layer.input_layernorm(stream)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """See TrainableHead."""
        output: Tensor = self.final_layernorm(super().finish(stream, attended))
        return output

    def public_state(self) -> dict[str, Tensor]:
        """See TrainableDrafter."""
        state = {name.removeprefix("layer."): tensor.detach() for name, tensor in self.state_dict().items()}
        return {MTP_PREFIX + name: tensor for name, tensor in state.items()}

    def config_fields(self, target_fields: dict[str, Any]) -> dict[str, Any]:
        """See TrainableDrafter. In a folder of its own: the target's, and how many modules there are."""
        return {**target_fields, "num_nextn_predict_layers": 1}
