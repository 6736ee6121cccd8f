"""Attention over paged KV by the Triton kernels of `kernels`; on a CPU, by their torch references."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.attention import branch_attention, list_branches, prefill_attention, tree_attention
from kernels.elementwise import rope_write, rotary_angles
from kernels.linear import norm_qkv
from kernels.linear_configs import fits_qkv_kernel
from outrider.attention.base import PLAIN, AttentionBackend, AttentionPlan, LayerRules, TokenBatch
from outrider.attention.paged import PagedBatch
from outrider.cache.kv import KVCache
from outrider.layers.linear import Linear, RMSNorm
from outrider.layers.rotary import Rotary


class TritonAttention(AttentionBackend):
    """Tree attention without host planning, and causal attention for prefill."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        if not isinstance(batch, PagedBatch):
            raise ValueError("the triton backend needs a paged batch")
        return TritonPlan(batch, kv, num_heads, rotary)


class TritonPlan(AttentionPlan):
    """In each layer one launch rotates and writes (in small models after norm and product), and one or two attend."""

    def __init__(self, batch: PagedBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> None:
        self.batch = batch
        self.token_slots = batch.slots
        self._kv = kv
        self._num_heads = num_heads
        self._scale = kv.k.shape[-1] ** -0.5
        self._rotary = rotary
        self._angles: dict[Rotary, tuple[Tensor, Tensor]] = {}
        self._branches = None
        if batch.region_base is not None:
            if batch.mask is None or batch.path is not None:
                raise ValueError("nodes in a tree region need a mask, and have no deterministic mode")
            rows = (batch.first, batch.table_rows, batch.page_tables)
            self._branches = list_branches(batch.mask, *rows, base=batch.region_base, page_size=batch.page_size)
        # After the lists, which attention reads early: this launch waits for them.
        self._angles_of(PLAIN)

    def _angles_of(self, rules: LayerRules) -> tuple[Tensor, Tensor]:
        """Return cos and sin for the batch, computed once per forward for each rotary embedding."""
        rotary = rules.rotary or self._rotary
        found = self._angles.get(rotary)
        if found is None:
            found = rotary_angles(self.batch.positions, rotary.half_frequencies, rotary.scale)
            self._angles[rotary] = found
        return found

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        """See AttentionPlan."""
        k, v = self._kv.k_layers[layer], self._kv.v_layers[layer]
        norm_weight, eps = (qk_norm.weight, qk_norm.eps) if qk_norm is not None else (None, 0.0)
        angles = self._angles_of(rules)
        q = rope_write(heads, *angles, self.batch.slots, k, v, self._num_heads, norm_weight, eps)
        return self._attention(q, k, v, rules)

    def attend_stream(
        self, layer: int, stream: Tensor, norm: RMSNorm, qkv: Linear, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN
    ) -> Tensor | None:
        """See AttentionPlan. Norm, product, rotation and writing are one launch if rows are few and narrow."""
        k, v = self._kv.k_layers[layer], self._kv.v_layers[layer]
        num_rows, size = stream.shape
        if k.dtype != stream.dtype:
            return None
        if not qkv.uses_row_kernel(stream) or not fits_qkv_kernel(num_rows, size, k.shape[-1], qk_norm is not None):
            return None
        head_norm, head_eps = (qk_norm.weight, qk_norm.eps) if qk_norm is not None else (None, 0.0)
        q = norm_qkv(
            stream,
            qkv.weight,
            *self._angles_of(rules),
            self.batch.slots,
            k,
            v,
            self._num_heads,
            norm=norm.weight,
            eps=norm.eps,
            bias=qkv.bias,
            qk_norm=head_norm,
            qk_eps=head_eps,
        )
        return self._attention(q, k, v, rules)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, rules: LayerRules) -> Tensor:
        batch = self.batch
        attend: dict[str, Any] = {
            "page_size": batch.page_size,
            "max_row_tokens": batch.max_row_tokens,
            "scale": self._scale if rules.scale is None else rules.scale,
            "rules": rules.scores,
        }
        where = (batch.page_tables, batch.table_rows, batch.first, batch.cached_len)
        if batch.mask is None:
            return prefill_attention(q, k, v, *where, **attend)
        attend["num_splits"] = batch.num_splits
        if self._branches is not None:
            return branch_attention(q, k, v, *where, self._branches, short=batch.short, **attend)
        return tree_attention(q, k, v, *where, batch.mask, path=batch.path, positions=batch.positions, **attend)
