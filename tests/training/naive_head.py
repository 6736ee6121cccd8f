"""The head run as inference runs it: token by token, one attention at a time, from the formulas alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider_tools.training.heads import TrainableEagle3Head
from outrider_tools.training.target import TargetModel


class NaiveHead:
    """A chain: keys and values so far, one row each."""

    def __init__(self, target: TargetModel, head: TrainableEagle3Head) -> None:
        self.weights = head.public_state()
        self.target = target
        self.eps = target.config.rms_norm_eps
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def feature(self, features: Tensor) -> Tensor:
        return self.weights["fc.weight"] @ features

    def fork(self) -> NaiveHead:
        other = object.__new__(NaiveHead)
        other.__dict__.update(self.__dict__)
        other.k, other.v = list(self.k), list(self.v)
        return other

    def run(self, token: int, feature: Tensor) -> Tensor:
        """The token's own feature; its position follows those that were run."""
        config, w = self.target.config, self.weights
        embedded = self.target.embed(torch.tensor(token))
        rows = torch.cat(
            [self._norm(embedded, "midlayer.input_layernorm"), self._norm(feature, "midlayer.hidden_norm")]
        )
        q, k, v = (
            (w[f"midlayer.self_attn.{name}_proj.weight"] @ rows).view(-1, config.head_dim) for name in ("q", "k", "v")
        )
        self.k.append(self._rotate(k, len(self.k)))
        self.v.append(v)
        q = self._rotate(q, len(self.k) - 1)
        found = []
        for number in range(config.num_heads):
            kv_head = number // (config.num_heads // config.num_kv_heads)
            keys, values = (torch.stack(rows)[:, kv_head] for rows in (self.k, self.v))
            found.append((keys @ q[number] / config.head_dim**0.5).softmax(0) @ values)
        stream = feature + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(found)
        rows = self._norm(stream, "midlayer.post_attention_layernorm")
        gate, up = (w[f"midlayer.mlp.{name}_proj.weight"] @ rows for name in ("gate", "up"))
        return stream + w["midlayer.mlp.down_proj.weight"] @ (functional.silu(gate) * up)

    def logits(self, feature: Tensor) -> Tensor:
        return self.weights["lm_head.weight"] @ self._norm(feature, "norm")

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.weights["d2t"][draft_id])

    def _norm(self, row: Tensor, name: str) -> Tensor:
        return row * (row.square().mean() + self.eps).rsqrt() * self.weights[f"{name}.weight"]

    def _rotate(self, heads: Tensor, position: int) -> Tensor:
        half = heads.shape[1] // 2
        angles = position / self.target.config.rope.theta ** (torch.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1
        )
