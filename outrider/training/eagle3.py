"""The trainable EAGLE-3 head (arXiv 2503.01840), under the key names that public heads have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.layers.rotary import Rotary, rotate
from outrider.models.config import ModelConfig
from outrider.training.attention import own_attention


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


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """[..., size]; the mean is taken in float32."""
        return (functional.rms_norm(rows.float(), rows.shape[-1:], None, self._eps) * self.weight).to(rows.dtype)


def _matrix(size_in: int, size_out: int) -> nn.Linear:
    matrix = nn.Linear(size_in, size_out, bias=False)
    nn.init.normal_(matrix.weight, std=size_in**-0.5)
    return matrix


class _Attention(nn.Module):
    """Queries, keys and values of twice the width: the token's embedding and the feature before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        width = 2 * config.hidden_size
        self.q_proj = _matrix(width, config.num_heads * config.head_dim)
        self.k_proj = _matrix(width, config.num_kv_heads * config.head_dim)
        self.v_proj = _matrix(width, config.num_kv_heads * config.head_dim)
        self.o_proj = _matrix(config.num_heads * config.head_dim, config.hidden_size)

    def project(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, heads, T, head_dim] of [B, T, 2 * hidden], rotated; each kv head repeated for its queries."""
        num_heads, num_kv_heads, head_dim = self._heads

        def split(projected: Tensor, count: int) -> Tensor:
            return projected.view(*rows.shape[:2], count, head_dim)

        q = rotate(split(self.q_proj(rows), num_heads), *angles)
        k = rotate(split(self.k_proj(rows), num_kv_heads), *angles)
        v = split(self.v_proj(rows), num_kv_heads)
        k, v = (part.repeat_interleave(num_heads // num_kv_heads, 2) for part in (k, v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """[B, H, T, D] to [B, T, hidden]."""
        projected: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected


class _Mlp(nn.Module):
    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate_proj = _matrix(hidden_size, size)
        self.up_proj = _matrix(hidden_size, size)
        self.down_proj = _matrix(size, hidden_size)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class _MidLayer(nn.Module):
    def __init__(self, config: ModelConfig, mlp_size: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config.hidden_size, mlp_size)
        self.hidden_norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """What attention projects: [..., 2 * hidden]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from its input feature and what its attention found."""
        stream = feature + self.self_attn.output(attended)
        output: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return output


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

    def __init__(self, shape: HeadShape, target_ids: Tensor) -> None:
        """`target_ids` int64 [draft_vocab_size]: the target's id of each draft id, ascending."""
        super().__init__()
        config = shape.target
        self.shape = shape
        self.fc = _matrix(len(shape.feature_layers) * config.hidden_size, config.hidden_size)
        self.midlayer = _MidLayer(config, shape.mlp_size)
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = _matrix(config.hidden_size, shape.draft_vocab_size)
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
        self.feature_scale.copy_(features.float().square().mean(0).sqrt().clamp_(min=1e-3))

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
            features of the step [B, T, hidden], which `norm` and `lm_head` turn into logits. Bases whose tokens
            lie behind the sequence hold nothing of meaning.
        """
        width = features.shape[1]
        feature = self.project(features)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for step in range(num_steps):
            # At the end of the sequence tokens are missing; zeros take their place.
            tokens = functional.pad(embedded[:, 1 + step :], (0, 0, 0, min(1 + step, width)))
            rows = self.midlayer.inputs(tokens, feature)
            positions = torch.arange(step, step + width, device=rows.device)
            q, k, v = self.midlayer.self_attn.project(rows, rotary.angles(positions, feature.dtype))
            if step == 0:
                true_k, true_v = k, v
                attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                own_keys.append(k)
                own_values.append(v)
                attended = own_attention(q, true_k, true_v, torch.stack(own_keys, 2), torch.stack(own_values, 2))
            feature = self.midlayer.finish(feature, attended)
            yield feature
