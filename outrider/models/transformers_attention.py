"""The attention that transformers calls in every layer, and what is behind it: a forward's plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.attention_tiles import ScoreRules
from outrider.attention.base import AttentionPlan, LayerRules
from outrider.layers.rotary import Rotary, rotate

NAME = "outrider"
"""Of our attention among those of transformers."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer asks of attention: the factor on scores, and what else is done to them."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def rules(self, head_dim: int, rotary: Rotary | None = None) -> LayerRules:
        """The same for a plan over heads of `head_dim`; `rotary`: if it is not the plan's."""
        sinks = None if self.sinks is None else self.sinks.float()
        scores = ScoreRules(self.window or 0, self.softcap or 0.0, sinks)
        is_usual = abs(self.scaling * head_dim**0.5 - 1.0) < 1e-6
        return LayerRules(None if is_usual else self.scaling, scores, rotary)


class Attends(ABC):
    """Whatever is behind the attention of a model's layers while it runs."""

    @abstractmethod
    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """q [1, H, M, D], k and v [1, KVH, M, D], rotated, to [1, M, H, size of v]. `layer` is the calling module."""

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """[M, H + 2 * KVH, D] before rotation, of layer `number`, to [M, H * D]."""
        raise NotImplementedError


_ATTENDS: ContextVar[Attends] = ContextVar("attends")


def under_way() -> Attends:
    """What attends in this thread."""
    return _ATTENDS.get()


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Within, layers that this thread runs attend so."""
    token = _ATTENDS.set(attends)
    try:
        yield
    finally:
        _ATTENDS.reset(token)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; without a mask function of its name the mask is None."""
    call = LayerCall(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    return under_way().attend(module, query, key, value, call), None


class PlannedForward(Attends):
    """A forward: attention by its plan, and the features that are wanted of it."""

    def __init__(
        self,
        plan: AttentionPlan,
        head_dim: int,
        still: Rotary | None,
        rules: Sequence[LayerRules],
        wanted: frozenset[int] = frozenset(),
    ) -> None:
        """`still` turns nothing: for heads that come rotated, if the plan turns those of other layers.

        `rules` are those of `attend_heads`, by layer.
        """
        self.wanted = wanted
        self.seen: dict[int, Tensor] = {}
        self._plan = plan
        self._size = head_dim
        self._still = still
        self._rules = rules
        self._told: dict[LayerCall, LayerRules] = {}

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """See Attends."""
        # Made once a forward for all layers that ask for the same.
        rules = self._told.get(call)
        if rules is None:
            rules = self._told[call] = call.rules(self._size, self._still)
        value_size = v.shape[-1]
        # Zeros change no score.
        parts = [
            part if part.shape[-1] == self._size else pad(part, (0, self._size - part.shape[-1])) for part in (q, k, v)
        ]
        heads = torch.cat([part.squeeze(0).transpose(0, 1) for part in parts], 1)
        attended = self._plan.attend(layer.layer_idx, heads, None, rules).view(1, q.shape[2], q.shape[1], self._size)
        return attended if value_size == self._size else attended[..., :value_size]

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """See Attends."""
        return self._plan.attend(number, heads, None, self._rules[number])


class DenseForward(Attends):
    """Attention of one text over itself, to try modules with."""

    def __init__(self, positions: Tensor, num_heads: int, rotary: Rotary, calls: Sequence[LayerCall]) -> None:
        """int64 positions [M]; `calls` by layer."""
        self._positions = positions
        self._num_heads = num_heads
        self._rotary = rotary
        self._calls = calls

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """See Attends."""
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scaling, enable_gqa=True)
        return attended.transpose(1, 2)

    def attend_heads(self, number: int, heads: Tensor) -> Tensor:
        """See Attends."""
        num_kv_heads = (heads.shape[1] - self._num_heads) // 2
        qk, v = heads.split((self._num_heads + num_kv_heads, num_kv_heads), 1)
        turned = rotate(qk, *self._rotary.angles(self._positions, heads.dtype))
        q, k = turned.split((self._num_heads, num_kv_heads), 1)
        parts = [part.transpose(0, 1).unsqueeze(0) for part in (q, k, v)]
        return self.attend(None, parts[0], parts[1], parts[2], self._calls[number]).flatten(2).squeeze(0)
