"""Batches of a forward, and the interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention_tiles import PLAIN_SCORES, ScoreRules
from kernels.cpu.stack import Queries
from outrider.cache.kv import KVCache
from outrider.layers.linear import Linear, RMSNorm
from outrider.layers.rotary import Rotary


@dataclass(slots=True)
class Segment:
    """The queries of one request in one forward.

    Logical positions 0..L-1 of the request:

        [ context: seen by every query ........ ][ the queries' own, num_queries of them ]
          kv_slots[0] ...                           ... kv_slots[L-1]

    Attributes:
        num_queries: at least 1.
        kv_slots: int64 [L], the KV slot of each logical position. The last `num_queries` are where the queries' own
            k and v are written in this forward.
        mask: bool [num_queries, K] over the last K logical positions, num_queries <= K <= L: True where a query may
            attend; every query must see itself, and sees all positions before the last K. None means causal.
        num_spare: number of slots behind the last one in memory that hold only finite numbers. A backend that reads
            keys in steps may read these slots, masked; without them it copies keys.
    """

    num_queries: int
    kv_slots: Tensor
    mask: Tensor | None = None
    num_spare: int = 0


@dataclass(slots=True)
class TokenBatch:
    """The tokens of one forward.

    Attributes:
        token_ids: int64 or int32 [M].
        positions: rotary positions, of the same shape and dtype. That of a tree node follows from its depth, not from
            its slot.
    """

    token_ids: Tensor
    positions: Tensor

    def queries(self) -> tuple[list[Queries], Tensor] | None:
        """On a CPU, return the keys that rows see, and the KV slots, int64 [M], of the tokens' own keys. None if only
        the device knows them."""
        return None


@dataclass(slots=True)
class ForwardBatch(TokenBatch):
    """A batch whose shape the host knows: segment after segment. No two segments share a query slot.

    Attributes:
        segments: their num_queries add up to M.
    """

    segments: list[Segment]

    def queries(self) -> tuple[list[Queries], Tensor] | None:
        """See TokenBatch."""
        found = [Queries(part.num_queries, part.kv_slots, part.mask) for part in self.segments]
        return found, torch.cat([part.kv_slots[-part.num_queries :] for part in self.segments])


@dataclass(frozen=True, slots=True)
class HostLengths:
    """Lengths of a batch of B rows in host memory, int32, for attention that is planned on the host.

    Attributes:
        first: [B + 1], where each row's tokens begin; tokens behind first[B] are padding.
        cached_len: [B], tokens of each row with valid KV.
    """

    first: NDArray[np.int32]
    cached_len: NDArray[np.int32]

    @property
    def num_keys(self) -> NDArray[np.int32]:
        """[B], keys that each row's last token sees; 0 for an empty row."""
        own = np.diff(self.first)
        keys: NDArray[np.int32] = np.where(own > 0, self.cached_len + own, 0).astype(np.int32)
        return keys


@dataclass(frozen=True, slots=True, eq=False)
class LayerRules:
    """The settings of a layer's attention that differ between models.

    Attributes:
        scale: factor on scores; None is head_dim ** -0.5.
        scores: window, cap and sinks.
        rotary: the layer's own rotary embedding, if it is not the plan's.
    """

    scale: float | None = None
    scores: ScoreRules = PLAIN_SCORES
    rotary: Rotary | None = None

    @property
    def is_plain(self) -> bool:
        """Whether queries see all keys, and scores get the usual scale and nothing else."""
        return self.scale is None and self.scores == PLAIN_SCORES


PLAIN = LayerRules()


class AttentionPlan(ABC):
    """The attention of one forward: made once, used by every layer."""

    token_slots: Tensor | None = None
    """int32 [M], negative for a token that is padding; None if there is no padding."""

    @abstractmethod
    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        """Rotate q and k, write k and v to the batch's slots, then attend.

        `heads` [M, num_heads + 2 * num_kv_heads, head_dim] holds query, key and value heads in that order.
        `qk_norm`, if given, is applied to query and key heads first.

        Returns [M, num_heads * head_dim] in the dtype of `heads`.
        """

    def attend_stream(
        self, layer: int, stream: Tensor, norm: RMSNorm, qkv: Linear, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN
    ) -> Tensor | None:
        """Do as `attend` for the heads that `qkv` computes from the normed `stream` [M, hidden], in fewer launches.

        Returns None, without having done anything, if no kernel supports these shapes.
        """
        return None


class AttentionBackend(ABC):
    """Makes plans. Holds no request state; one backend serves every forward of a model."""

    plans_on_host = False
    """Whether `prepare` must be called before every forward of trees."""

    def prepare(self, num_tokens: int, lengths: HostLengths, page_tables: Tensor) -> None:  # noqa: B027
        """Plan a forward of trees on the host, with `num_tokens` token slots over `page_tables`.

        Called before every such forward, including replays of a captured one; never captured itself. Backends that do
        not plan on the host ignore it.
        """

    @abstractmethod
    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """Compute what all layers of the forward share, for `num_heads` query heads: angles, indices, masks, groups.

        Raises ValueError for a batch that this backend cannot run, or whose segments do not fit it.
        """
