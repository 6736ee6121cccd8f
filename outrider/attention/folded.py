"""Grouped-query attention of few queries: the query heads of one kv head become rows of one product."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def folded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of B rows of n queries each, with H query heads in groups of G to a kv head.

    Args:
        q: [B * n, H, D].
        k: [B, K, L, D]; so are its values `v`.
        mask: what is added to scores, in the dtype of `q`, broadcast to [B, K, G * n, L]: the same n rows G times.
            None where every query sees every key.

    Returns:
        [B * n, H * D].
    """
    size, num_kv_heads, _, head_dim = k.shape
    num_rows, group = q.shape[0], q.shape[1] // num_kv_heads
    count = num_rows // size
    rows = q.view(size, count, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(size, num_kv_heads, group * count, head_dim)
    output = scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return output.view(size, num_kv_heads, group, count, head_dim).permute(0, 3, 1, 2, 4).reshape(num_rows, -1)
