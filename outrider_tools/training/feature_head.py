"""What trainable heads on the target's last hidden state share: EAGLE-1 and EAGLE-2 heads, and MTP modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider_tools.training.decoder import Layer
from outrider_tools.training.unroll import unroll


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
    def enter(self, embedded: Tensor, feature: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        """The residual stream that the layer takes, and what its attention projects, both [B, T, hidden].

        `first`: the features are the target's.
        """

    @abstractmethod
    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """The head's output, from the stream that entered the layer and what its attention found [B, H, T, D]."""

    def unroll(self, features: Tensor, embedded: Tensor, rotary: Rotary, num_steps: int) -> Iterator[Tensor]:
        """Run the head `num_steps` times at every base at once: `unroll.unroll`, from features [B, T, hidden]."""
        project = self.layer.self_attn.project
        return unroll(features, embedded, rotary, num_steps, enter=self.enter, project=project, finish=self.finish)
