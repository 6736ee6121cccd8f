"""What a forward is given, and what an attention backend must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from outrider.cache.kv import KVCache


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
        mask: bool [num_queries, num_queries], True where query i may attend to query j's k and v; every query must
            see itself. None means causal.
    """

    num_queries: int
    kv_slots: Tensor
    mask: Tensor | None = None


@dataclass(slots=True)
class ForwardBatch:
    """The tokens of one forward, segment after segment; segments share no query slot.

    Attributes:
        token_ids: int64 [M].
        positions: int64 [M], rotary positions; a tree node's is its depth below the base, whatever its slot.
        segments: their num_queries add up to M.
    """

    token_ids: Tensor
    positions: Tensor
    segments: list[Segment]


class AttentionPlan(ABC):
    """One forward's attention: made once, used by every layer."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v [M, num_kv_heads, head_dim] of the batch, then attend with q [M, num_heads, head_dim].

        Returns:
            [M, num_heads * head_dim] in q's dtype.
        """


class AttentionBackend(ABC):
    """Makes plans. Holds no request state; one backend serves every forward of a model."""

    @abstractmethod
    def plan(self, batch: ForwardBatch, kv: KVCache, num_heads: int) -> AttentionPlan:
        """Do all host work of the forward's attention, for `num_heads` query heads: indices, masks, grouping.

        Raises:
            ValueError: segments that do not fit the batch.
        """
