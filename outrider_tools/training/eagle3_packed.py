"""An EAGLE-3 head's unrolled steps over packed sequences, in a few large pieces that may be compiled.

The same function as `Eagle3Head.unroll`, for batches of one shape on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.layers.rotary import Rotary, rotate
from outrider_tools.training.eagle3 import Eagle3Head
from outrider_tools.training.packed_attention import OwnColumns, Spans, own_attention


class PackedUnroll:
    """`wrap` is applied to each piece: a compiler, or what leaves it as it is."""

    def __init__(self, head: Eagle3Head, rotary: Rotary, wrap: Callable[[Any], Any]) -> None:
        self._rotary = rotary
        self._project = wrap(head.project)
        self._before = wrap(_Before(head))
        self._after = wrap(_After(head))
        self._columns = OwnColumns(wrap)

    def steps(self, features: Tensor, embedded: Tensor, spans: Spans, num_steps: int) -> Iterator[Tensor]:
        """See Eagle3Head.unroll: features [M, layers * hidden] and embeddings [M, hidden] to features [M, hidden].

        Bases whose tokens lie behind their sequence hold nothing of meaning.
        """
        num_tokens = features.shape[0]
        feature = self._project(features)
        tokens = functional.pad(embedded, (0, 0, 0, num_steps))
        own_k: list[Tensor] = []
        own_v: list[Tensor] = []
        for step in range(num_steps):
            angles = self._rotary.angles(spans.positions + step, feature.dtype)
            q, k, v = self._before(tokens[1 + step : 1 + step + num_tokens], feature, *angles)
            if step == 0:
                true_k, true_v = k, v
            else:
                own_k.append(k)
                own_v.append(v)
            attended = own_attention(q, true_k, true_v, own_k, own_v, spans, self._columns)
            feature = self._after(feature, attended)
            yield feature


class _Before(torch.nn.Module):
    """What a step's attention takes."""

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self._layer = head.midlayer
        config = head.shape.target
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim

    def forward(self, tokens: Tensor, feature: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [M, H, D], k and v [M, KVH, D]; q and k are rotated."""
        rows = self._layer.inputs(tokens, feature)
        attention = self._layer.self_attn
        q = rotate(attention.q_proj(rows).unflatten(1, (self._heads, self._dim)), cos, sin)
        k = rotate(attention.k_proj(rows).unflatten(1, (self._kv_heads, self._dim)), cos, sin)
        v = attention.v_proj(rows).unflatten(1, (self._kv_heads, self._dim))
        return q, k, v


class _After(torch.nn.Module):
    """What follows a step's attention."""

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self._layer = head.midlayer

    def forward(self, feature: Tensor, attended: Tensor) -> Tensor:
        """[M, hidden] and [M, H, D] to [M, hidden]."""
        stream = feature + self._layer.self_attn.o_proj(attended.flatten(1))
        output: Tensor = stream + self._layer.mlp(self._layer.post_attention_layernorm(stream))
        return output


def pick_rows(matrix: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Rows of a matrix [M, K] at int64 `rows` [R]; `places` int64 [M] has where each row went, R for nowhere."""
    picked: Tensor = _PickRows.apply(matrix, rows, places)  # type: ignore[no-untyped-call]
    return picked


class _PickRows(torch.autograd.Function):
    """Rows of a matrix, each at most once, so that backward is a look-up too."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return matrix.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Nothing for rows that were picked a second time.
        (places,) = ctx.saved_tensors
        return functional.pad(grad, (0, 0, 0, 1)).index_select(0, places), None, None
