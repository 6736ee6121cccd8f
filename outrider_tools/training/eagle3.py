"""The trainable EAGLE-3 head (arXiv 2503.01840), under the key names that public heads have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig
from outrider_tools.training.channels import channel_sizes
from outrider_tools.training.decoder import INPUT_NORM, MLP_NORM, Layer, Norm, llama_layer, matrix
from outrider_tools.training.unroll import unroll


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Early, middle and late: the residual stream as it enters these layers, as public heads have it."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head. Its attention has the target's own; so has its MLP, unless `intermediate_size` is given."""

    target: ModelConfig
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    intermediate_size: int = 0

    @property
    def mlp_size(self) -> int:
        """Width of the MLP."""
        return self.intermediate_size or self.target.intermediate_size


class _MidLayer(Layer):
    """Its queries, keys and values are of twice the width: the token's embedding and the feature before it."""

    hidden_norm: Norm

    def __init__(self, config: ModelConfig, mlp_size: int) -> None:
        plain = replace(llama_layer(config), intermediate_size=mlp_size)
        super().__init__(plain, ("hidden_norm", INPUT_NORM, MLP_NORM), 2 * config.hidden_size)

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """What attention projects: [..., 2 * hidden]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)


class Eagle3Head(nn.Module):
    """Guesses the token after next from the target's features and the next token.

    At base t the input is the feature of position t with token t + 1, and the first guess is token t + 2. Step j of
    the unrolled head takes its own feature of step j - 1 with token t + 1 + j, and guesses token t + 2 + j.
    """

    d2t: Tensor
    t2d: Tensor
    feature_scale: Tensor
    """[layers * hidden], what features are divided by before `fc`. Channels of a residual stream differ a
    hundredfold, and an optimiser that moves all weights alike wants inputs of one size. Part of `fc` when exported."""
    learned: bool
    """Whether `fc` has learned already: `calibrate` then leaves what it computes as it is."""

    def __init__(self, shape: HeadShape, target_ids: Tensor) -> None:
        """`target_ids` int64 [draft_vocab_size]: the target's id of each draft id, ascending."""
        super().__init__()
        config = shape.target
        self.shape = shape
        self.learned = False
        self.fc = matrix(len(shape.feature_layers) * config.hidden_size, config.hidden_size)
        self.midlayer = _MidLayer(config, shape.mlp_size)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = matrix(config.hidden_size, shape.draft_vocab_size)
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[target_ids] = True
        # Public heads store the difference of the two ids.
        self.register_buffer("d2t", target_ids - torch.arange(shape.draft_vocab_size))
        self.register_buffer("t2d", known)
        self.register_buffer("feature_scale", torch.ones(self.fc.in_features))

    @property
    def target_ids(self) -> Tensor:
        """int64 [draft_vocab_size]."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    @property
    def draft_ids(self) -> Tensor:
        """int64 [vocab_size]; -1 for tokens that are not in the draft vocabulary."""
        return torch.where(self.t2d, self.t2d.long().cumsum(0) - 1, -1)

    @torch.no_grad()
    def calibrate(self, features: Tensor) -> None:
        """Set the scale of each channel to its root mean square over features [N, layers * hidden]."""
        sizes = channel_sizes(features)
        if self.learned:
            self.fc.weight.mul_(sizes / self.feature_scale)
        self.feature_scale.copy_(sizes)

    def project(self, features: Tensor) -> Tensor:
        """The target's features [..., layers * hidden] as a step takes them, [..., hidden]."""
        projected: Tensor = self.fc(features / self.feature_scale.to(features.dtype))
        return projected

    def public_state(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by their public names."""
        state = dict(self.state_dict())
        state["fc.weight"] = self.fc.weight.detach() / state.pop("feature_scale")
        return state

    def unroll(self, features: Tensor, embedded: Tensor, rotary: Rotary, num_steps: int) -> Iterator[Tensor]:
        """Run the head `num_steps` times at every base at once.

        Args:
            features: [B, T, layers * hidden], the target's.
            embedded: [B, T, hidden], embeddings of the tokens.
            rotary: the target's.
            num_steps: at least 1.

        Yields:
            features of the step [B, T, hidden], which `norm` and `lm_head` turn into logits; see `unroll.unroll`.
        """
        layer = self.midlayer
        return unroll(
            self.project(features),
            embedded,
            rotary,
            num_steps,
            enter=lambda tokens, feature, first: (feature, layer.inputs(tokens, feature)),
            project=layer.self_attn.project,
            finish=layer.finish,
        )
