"""See kernels.move."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import power_of_two


@triton.jit(do_not_specialize=["num_moves"])
def _move(k, v, moves, num_moves, layer_stride, WIDTH: tl.constexpr, PART: tl.constexpr, PAIRS: tl.constexpr):
    """Grid (groups of PAIRS pairs, layers, parts of a slot)."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_moves
    source = tl.load(moves + pair * 2, mask=inside, other=-1)
    target = tl.load(moves + pair * 2 + 1, mask=inside, other=-1)
    inside = (source >= 0) & (target >= 0)
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    element = tl.program_id(2) * PART + tl.arange(0, PART)
    both = inside[:, None] & (element < WIDTH)[None, :]
    old = layer + source.to(tl.int64)[:, None] * WIDTH + element[None, :]
    new = layer + target.to(tl.int64)[:, None] * WIDTH + element[None, :]
    keys = tl.load(k + old, mask=both)
    values = tl.load(v + old, mask=both)
    tl.store(k + new, keys, mask=both)
    tl.store(v + new, values, mask=both)


def move(k: Tensor, v: Tensor, moves: Tensor) -> None:
    """As kernels.move.move."""
    layers, _, kv_heads, dim = k.shape
    width = kv_heads * dim
    part = min(power_of_two(width), 1024)
    pairs = 4
    _move[(triton.cdiv(moves.shape[0], pairs), layers, triton.cdiv(width, part))](
        k, v, moves, moves.shape[0], k.stride(0), WIDTH=width, PART=part, PAIRS=pairs, num_warps=4
    )
