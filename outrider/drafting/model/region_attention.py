"""Attention of draft steps on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.stack import Queries
from outrider.attention.base import PLAIN, AttentionBackend, AttentionPlan, LayerRules, TokenBatch
from outrider.attention.torch_backend import HeadSplit, folded_attention
from outrider.cache.kv import KVCache
from outrider.layers.linear import RMSNorm
from outrider.layers.rotary import Rotary


@dataclass(slots=True)
class RowSteps:
    """A request of a step.

    Attributes:
        row: of the burst.
        slots: int64 [n], tree slots of the step's nodes.
        places: int64 [L + u], KV slots of the context and of the tree's first u slots, the last one in use among them.
        seen: bool [n, u], which of those tree slots each node sees.
    """

    row: int
    slots: Tensor
    places: Tensor
    seen: Tensor

    @property
    def context_len(self) -> int:
        """L."""
        return len(self.places) - self.seen.shape[1]


@dataclass(slots=True)
class StepBatch(TokenBatch):
    """Nodes of a step, row by row; `kv_slots` int64 [M] is where their keys and values go."""

    kv_slots: Tensor
    rows: Sequence[RowSteps]

    def queries(self) -> tuple[list[Queries], Tensor]:
        """See TokenBatch."""
        return [Queries(len(part.slots), part.places, part.seen) for part in self.rows], self.kv_slots


class RegionAttention(AttentionBackend):
    """Keys and values of a burst's requests lie side by side, context first, gathered once for all steps.

    What nodes write goes to the cache, too.
    """

    def __init__(self, kv: KVCache, places: Sequence[Tensor], region: int) -> None:
        """For each request of the burst: KV slots of its context and of its tree region, int64 [L + region]."""
        self._kv, self._places = kv, places
        self._lengths = [len(found) - region for found in places]
        self._held: list[list[tuple[Tensor, Tensor]]] = []

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend. Raises TypeError for another batch than a step's."""
        if not isinstance(batch, StepBatch):
            raise TypeError(f"{type(batch).__name__} is no step of a burst")
        if not self._held:
            layers = range(len(self._kv.k_layers))
            self._held = [[_gather(self._kv, layer, places) for layer in layers] for places in self._places]
        split = HeadSplit(batch, kv, num_heads, rotary)
        return _RegionPlan(batch, kv, split, num_heads // kv.k.shape[2], self._held, self._lengths)


class _RegionPlan(AttentionPlan):
    def __init__(
        self,
        batch: StepBatch,
        kv: KVCache,
        split: HeadSplit,
        per_kv_head: int,
        held: Sequence[Sequence[tuple[Tensor, Tensor]]],
        lengths: Sequence[int],
    ) -> None:
        self._batch = batch
        self._kv = kv
        self._split = split
        self._held = held
        self._lengths = lengths
        self._places = [part.slots + lengths[part.row] for part in batch.rows]
        self._masks = [_mask(part, kv.k.dtype).repeat(per_kv_head, 1) for part in batch.rows]

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        q, k, v = self._split(heads, qk_norm, rules.rotary)
        self._kv.write(layer, self._batch.kv_slots, k, v)
        outputs, first = [], 0
        for part, places, mask in zip(self._batch.rows, self._places, self._masks, strict=True):
            end = first + len(part.slots)
            keys, values = self._held[part.row][layer]
            keys.index_copy_(1, places, k[first:end].transpose(0, 1))
            values.index_copy_(1, places, v[first:end].transpose(0, 1))
            seen_keys, seen_values = (held[:, : mask.shape[1]].unsqueeze(0) for held in (keys, values))
            if rules.scores.window:
                mask = _within(mask, self._batch.positions[first:end], self._lengths[part.row], rules.scores.window)
            outputs.append(folded_attention(q[first:end], seen_keys, seen_values, mask, rules))
            first = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _mask(part: RowSteps, dtype: torch.dtype) -> Tensor:
    """[n, L + u], 0 where a node sees, else -inf."""
    mask = torch.zeros(len(part.slots), len(part.places), dtype=dtype)
    mask[:, part.context_len :].masked_fill_(~part.seen, -torch.inf)
    return mask


def _within(mask: Tensor, positions: Tensor, length: int, window: int) -> Tensor:
    """The mask of a row with what the window hides of its context of `length`; all of its tree counts as near."""
    far = torch.arange(length, device=mask.device) <= positions.unsqueeze(1) - window
    mask = mask.clone()
    mask[:, :length].masked_fill_(far.repeat(len(mask) // len(far), 1), float("-inf"))
    return mask


def _gather(kv: KVCache, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, each [K, L + region, D]."""
    keys, values = (
        cache.index_select(0, places).transpose(0, 1).contiguous() for cache in (kv.k_layers[layer], kv.v_layers[layer])
    )
    return keys, values
