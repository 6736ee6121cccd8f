"""Attention of draft steps on a CPU: keys and values of a burst's requests lie side by side, context first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.attention.torch_backend import HeadSplit, folded_attention
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary


@dataclass(slots=True)
class RowSteps:
    """A request of a step.

    Attributes:
        row: of the burst.
        num_nodes: of the step.
        slots: int64 [num_nodes], their tree slots.
        mask: [num_nodes, context_len + slots up to the last one in use], 0 where a node sees, else -inf.
    """

    row: int
    num_nodes: int
    slots: Tensor
    mask: Tensor


@dataclass(slots=True)
class StepBatch(TokenBatch):
    """Nodes of a step, row by row; `kv_slots` int64 [M] is where their keys and values go."""

    kv_slots: Tensor
    rows: Sequence[RowSteps]


class RegionAttention(AttentionBackend):
    """Holds what the nodes of one burst may attend to; what they write goes to the cache, too."""

    def __init__(self, kv: KVCache, contexts: Sequence[Tensor], regions: Sequence[slice]) -> None:
        """For each request of the burst: KV slots of its context int64 [L], and of its tree region."""
        self._lengths = [len(context) for context in contexts]
        self._held = [
            [_gather(kv, layer, context, region) for layer in range(len(kv.k_layers))]
            for context, region in zip(contexts, regions, strict=True)
        ]

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend. Raises TypeError for another batch than a step's."""
        if not isinstance(batch, StepBatch):
            raise TypeError(f"{type(batch).__name__} is no step of a burst")
        split = HeadSplit(batch, kv, num_heads, rotary)
        return _Plan(batch, kv, split, num_heads // kv.k.shape[2], self._held, self._lengths)


class _Plan(AttentionPlan):
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
        self._places = [part.slots + lengths[part.row] for part in batch.rows]
        self._masks = [part.mask.repeat(per_kv_head, 1) for part in batch.rows]

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        q, k, v = self._split(heads, qk_norm)
        self._kv.write(layer, self._batch.kv_slots, k, v)
        outputs, first = [], 0
        for part, places, mask in zip(self._batch.rows, self._places, self._masks, strict=True):
            end = first + part.num_nodes
            keys, values = self._held[part.row][layer]
            keys.index_copy_(1, places, k[first:end].transpose(0, 1))
            values.index_copy_(1, places, v[first:end].transpose(0, 1))
            seen_keys, seen_values = (held[:, : mask.shape[1]].unsqueeze(0) for held in (keys, values))
            outputs.append(folded_attention(q[first:end], seen_keys, seen_values, mask))
            first = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gather(kv: KVCache, layer: int, context: Tensor, region: slice) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, each [K, L + region, D]."""
    caches = (kv.k_layers[layer], kv.v_layers[layer])
    keys, values = (
        torch.cat((cache.index_select(0, context), cache[region])).transpose(0, 1).contiguous() for cache in caches
    )
    return keys, values
