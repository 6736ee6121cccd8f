"""From what a layer's qkv projection makes to rotated queries and keys, in plain torch."""

from __future__ import annotations

from torch import Tensor

from outrider.attention.base import TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary, rotate


class HeadSplit:
    """Splits the heads of a forward's M tokens into q, k and v; made once, used by every layer."""

    def __init__(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> None:
        """See AttentionBackend.plan. Of `kv`, the number of its heads and its dtype count."""
        self._sizes = (num_heads, kv.k.shape[2])
        self._angles = rotary.angles(batch.positions, kv.k.dtype)

    def __call__(self, heads: Tensor, qk_norm: RMSNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        """See AttentionPlan.attend: q [M, num_heads, head_dim], k and v [M, num_kv_heads, head_dim], views of larger
        tensors; q and k are normed, if there is a norm, and rotated.
        """
        num_heads, num_kv_heads = self._sizes
        qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if qk_norm is not None:
            qk = qk_norm(qk)
        q, k = rotate(qk, *self._angles).split(self._sizes, 1)
        return q, k, v
