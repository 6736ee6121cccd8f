"""What the attention kernels share: finding a tile's row, key slots, and the online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.jit.prefetch import prefetch_lines


@triton.jit
def find_tile(first, num_rows, num_tokens, tile, TOKENS: tl.constexpr, ROWS_PAD: tl.constexpr):
    """The request row of a tile of TOKENS tokens, and the tile's place in it.

    Row `num_rows` stands for the padding tokens; rows past it have no tiles. ROWS_PAD > num_rows.
    """
    lanes = tl.arange(0, ROWS_PAD)
    begin = tl.load(first + lanes, mask=lanes <= num_rows, other=0)
    end = tl.load(first + lanes + 1, mask=lanes < num_rows, other=0)
    end = tl.where(lanes == num_rows, num_tokens, end)
    tiles = (end - begin + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    before = ends <= tile
    row = tl.sum(before.to(tl.int32), 0)
    place = tile - tl.sum(tl.where(before, tiles, 0), 0)
    return row, place


@triton.jit
def find_row(first, num_rows, token, ROWS_PAD: tl.constexpr):
    """The request row of a token; num_rows for a padding token."""
    lanes = tl.arange(0, ROWS_PAD)
    end = tl.load(first + lanes + 1, mask=lanes < num_rows, other=2147483647)
    return tl.sum((end <= token).to(tl.int32), 0)


@triton.jit
def read(pointers, ON_GPU: tl.constexpr):
    """The int32 at each pointer.

    On a GPU by an instruction that the compiler does not take for a load: it would copy these few numbers through
    shared memory, a stage of the pipeline of its own, and have the keys behind them wait. Callers read a step ahead.
    """
    if ON_GPU:
        numbers = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        numbers = tl.load(pointers)
    return numbers


@triton.jit
def held(tile, ON_GPU: tl.constexpr):
    """A tile that is in registers from here on: the compiler would put its loads off until it is used."""
    if ON_GPU:
        PACK: tl.constexpr = 32 // tile.dtype.primitive_bitwidth
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=PACK)
    return tile


@triton.jit
def key_slots(table, keys, last, PAGE: tl.constexpr, ON_GPU: tl.constexpr):
    """The int64 KV slots of logical positions `keys`; beyond `last`, that of `last`."""
    keys = tl.minimum(keys, last)
    return read(table + keys // PAGE, ON_GPU).to(tl.int64) * PAGE + keys % PAGE


@triton.jit
def page_slots(table, start, last, KEYS: tl.constexpr, PAGE: tl.constexpr, ON_GPU: tl.constexpr):
    """KV slots of the key tile at logical position `start`: the int64 slot of a page for each key, and what to add.

    Where pages fill a tile, what to add is the same for all tiles, so a loop over them need not compute it again.
    """
    lanes = tl.arange(0, KEYS)
    if KEYS % PAGE == 0:
        # A pipelined loop asks for tiles behind its last one.
        pages = read(table + tl.minimum(start // PAGE + lanes // PAGE, last // PAGE), ON_GPU)
        first_slots, within = pages.to(tl.int64) * PAGE, lanes % PAGE
    else:
        first_slots, within = key_slots(table, start + lanes, last, PAGE, ON_GPU), tl.zeros([KEYS], tl.int32)
    return first_slots, within


@triton.jit
def prefetch_tile(
    k_head, v_head, table, low, end, last,
    LINE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Ask for keys and values of the tile at `low`, of those positions that lie before `end`."""
    LINES: tl.constexpr = DIM * k_head.dtype.element_ty.primitive_bitwidth // 1024
    ahead = tl.minimum(low + tl.arange(0, KEYS), end - 1)
    lines = key_slots(table, ahead, last, PAGE, ON_GPU)[:, None] * LINE
    lines += tl.arange(0, LINES)[None, :] * (DIM // LINES)
    prefetch_lines(k_head + lines)
    prefetch_lines(v_head + lines)


@triton.jit
def online(products, v, top, mass, acc, scale):
    """One step of the online softmax, base 2, over a tile of unscaled scores; -inf hides a key.

    Explicit fma: what the compiler fuses must not differ between copies of this code, or the result of a token would
    depend on which copy its keys went through.
    """
    new_top = tl.maximum(top, tl.max(products, 1) * scale)
    # A query that has seen no key yet keeps -inf, and -inf minus -inf is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(products, scale, -base[:, None]))
    shrink = tl.exp2(top - base)
    mass = tl.fma(mass, shrink, tl.sum(weights, 1))
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, mass, acc


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Top score, mass and weighted sum of queries that have seen no key: where `online` begins."""
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def see_context(
    tile_q, k_head, v_head, table, low, end, last, top, mass, acc, scale,
    LINE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Steps of `online` over whole key tiles that all queries see, from `low` to `end`."""
    dims = tl.arange(0, DIM)
    for start in tl.range(low, end, KEYS, num_stages=STAGES):
        pages, within = page_slots(table, start, last, KEYS, PAGE, ON_GPU)
        # In this order: where pages fill a tile, only the pages differ between steps.
        inner = within[:, None] * LINE + dims[None, :]
        outer = pages[:, None] * LINE
        tile_k = tl.load(k_head + inner + outer)
        tile_v = tl.load(v_head + inner + outer)
        products = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee")
        top, mass, acc = online(products, tile_v, top, mass, acc, scale)
    return top, mass, acc
