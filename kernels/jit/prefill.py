"""See kernels.attention.prefill_attention."""

from __future__ import annotations

from math import e, log2

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import TileConfig, max_tiles, power_of_two
from kernels.jit.online import find_tile, key_slots, nothing_seen, online
from kernels.jit.splits import tile_tokens


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def attend_causal(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, output,
    num_rows, num_tokens, table_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROWS_PAD: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads). Every query goes through the key tiles from position 0 on, so where a chunk of the
    prompt begins changes nothing: a tile that hides all its keys from a query leaves that query's sums as they are.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    # The last tiles of a row have the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, place = find_tile(first, num_rows, num_tokens, tile, TOKENS, ROWS_PAD)
    real = row < num_rows
    row_first = tl.load(first + row, mask=row <= num_rows, other=0)
    row_end = tl.load(first + row + 1, mask=real, other=0)
    row_end = tl.where(row == num_rows, num_tokens, row_end)
    cached = tl.load(cached_len + row, mask=real, other=0)
    table_row = tl.load(table_rows + row, mask=real, other=0)
    table = page_tables + table_row.to(tl.int64) * table_stride
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row > num_rows:
        return

    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    tile_first = row_first + place * TOKENS
    token = tile_first + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    position = cached + token - row_first
    # Keys below `open_end` are seen by every query of the tile; those from `high` on by none.
    open_end = (cached + tile_first - row_first + 1) // KEYS * KEYS
    high = cached + tl.minimum(tile_first + TOKENS, row_end) - row_first
    open_end = tl.where(real, open_end, 0)
    high = tl.where(real, high, 0)
    top, mass, acc = nothing_seen(ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)

    last = tl.maximum(high - 1, 0)
    slots = key_slots(table, tl.arange(0, KEYS), last, PAGE, ON_GPU)
    for start in tl.range(0, open_end, KEYS, num_stages=STAGES):
        where = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        slots = key_slots(table, start + KEYS + tl.arange(0, KEYS), last, PAGE, ON_GPU)
        tile_k = tl.load(k_head + where)
        tile_v = tl.load(v_head + where)
        products = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee")
        top, mass, acc = online(products, tile_v, top, mass, acc, scale)

    for start in tl.range(open_end, high, KEYS, num_stages=STAGES):
        where = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        slots = key_slots(table, start + KEYS + tl.arange(0, KEYS), last, PAGE, ON_GPU)
        keys = start + tl.arange(0, KEYS)
        inside = (keys < high)[:, None]
        tile_k = tl.load(k_head + where, mask=inside, other=0.0)
        tile_v = tl.load(v_head + where, mask=inside, other=0.0)
        seen = keys[None, :] <= position[:, None]
        products = tl.where(seen, tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), float("-inf"))
        top, mass, acc = online(products, tile_v, top, mass, acc, scale)

    # Padding tokens come here with nothing summed, and get zeros.
    result = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    tl.store(output + at[:, None] * DIM + dims[None, :], result.to(output.dtype.element_ty), mask=row_ok[:, None])


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, out: Tensor,
    page_size: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig,
) -> None:  # fmt: skip
    """As kernels.attention.prefill_attention."""
    num_tokens, num_heads, dim = q.shape
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = tile_tokens(config, num_heads, kv_heads)
    tiles = max_tiles(num_tokens, num_rows, max_row_tokens, tokens, padding=True)
    attend_causal[(tiles, kv_heads)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, out,
        num_rows, num_tokens, page_tables.stride(0), scale * log2(e),
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size,
        ROWS=config.rows, KEYS=config.keys, ROWS_PAD=power_of_two(num_rows + 1), STAGES=config.num_stages,
        PDL=pdl, ON_GPU=q.is_cuda, num_warps=config.num_warps, maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip
