"""What trainable heads on the target's last hidden state share: EAGLE-1 and EAGLE-2 heads, and MTP modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider.training.attention import own_attention
from outrider.training.decoder import Layer


class FeatureHead(nn.Module, ABC):
    """Guesses the token after next from the target's last hidden state and the next token, as `Eagle3Head` does.

    What it computes stands in the place of the next hidden state: the target's output matrix makes logits of it, and
    the next step takes it as feature.
    """

    layer: Layer

    def __init__(self, config: ModelConfig) -> None:
        """`config` is the target's."""
        super().__init__()
        self.config = config

    @abstractmethod
    def calibrate(self, features: Tensor, embedded: Tensor) -> None:
        """Fit what depends on the sizes of the target's features and embeddings, [N, hidden] both."""

    @abstractmethod
    def public_state(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by their public names."""

    @abstractmethod
    def enter(self, embedded: Tensor, feature: Tensor, first: bool) -> Tensor:
        """The residual stream [B, T, hidden] that the layer takes. `first`: the features are the target's."""

    @abstractmethod
    def attention_rows(self, stream: Tensor) -> Tensor:
        """What attention projects."""

    @abstractmethod
    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """The head's output, from the stream that entered the layer and what its attention found [B, H, T, D]."""

    def unroll(self, features: Tensor, embedded: Tensor, rotary: Rotary, num_steps: int) -> Iterator[Tensor]:
        """Run the head `num_steps` times at every base at once.

        Step j is what drafting j + 1 tokens past the root computes: queries see the keys of step 0 up to their base,
        and those that their own chain has made since.

        Args:
            features: [B, T, hidden], the target's.
            embedded: [B, T, hidden], embeddings of the tokens.
            rotary: the target's.
            num_steps: at least 1.

        Yields:
            outputs of the step [B, T, hidden]. Bases whose tokens lie behind the sequence hold nothing of meaning.
        """
        width = features.shape[1]
        feature, own_keys, own_values = features, [], []
        for step in range(num_steps):
            # At the end of the sequence tokens are missing; zeros take their place.
            tokens = functional.pad(embedded[:, 1 + step :], (0, 0, 0, min(1 + step, width)))
            stream = self.enter(tokens, feature, step == 0)
            positions = torch.arange(step, step + width, device=stream.device)
            angles = rotary.angles(positions, features.dtype)
            q, k, v = self.layer.self_attn.project(self.attention_rows(stream), angles)
            if step == 0:
                true_k, true_v = k, v
                attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                own_keys.append(k)
                own_values.append(v)
                attended = own_attention(q, true_k, true_v, torch.stack(own_keys, 2), torch.stack(own_values, 2))
            feature = self.finish(stream, attended)
            yield feature
