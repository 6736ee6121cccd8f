"""Products of rows in bfloat16 with a matrix on a CPU, whose weights are read as they are stored, in few bits.

A tile instruction (AMX, Intel's since 2023) multiplies 16 rows of 32 columns by those of 16 weight rows, so sixteen
rows take hardly longer than one, which is bound by reading the weights: see kernels.cpu.tiles. Without these, weights
of few bits are multiplied as bytes if there are instructions for that, and all others are converted to float32 in
registers: see kernels.cpu.vectors. llvmlite compiles the code when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.isa import Isa, best_isa, needed_isa
from kernels.cpu.layout import (
    AHEAD,
    BLOCKS,
    COUNTERS,
    GROUP,
    LARGEST_CODE,
    PREPARE_ARGS,
    TILE,
    TILES_ARGS,
    TINY,
    prepared_size,
)
from kernels.cpu.rows import row_function

MAX_ROWS = 64
"""Most rows for which weights of few bits are best with tiles: they are converted again for every 16 rows, or 8."""
_CHUNKS = 4
"""Chunks of a product for each thread."""
_ROUNDED = 128
"""Tiles that are rounded together, to limit memory."""
_TOGETHER = 256
"""Rows that are prepared at once; each thread prepares them for itself."""
_PRODUCT = (
    "x", "row_stride", "w", "y", "out_stride", "blocks", "tiles", "count", "prepared", "chunk", "chunks", "counters",
    "counter_bytes",
)  # fmt: skip


class Packed(NamedTuple):
    """A matrix [num_out, size] in the layout that products read.

    `kind`: "four", "eight" or "half", for 4, 8 or 16 bits a weight.
    """

    kind: str
    blocks: Tensor
    num_out: int
    size: int


def fits(weight: Tensor) -> bool:
    """Whether a weight can be packed and multiplied here: [out, in] in bfloat16, on a CPU."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return weight.shape[0] % TILE == 0 and weight.shape[1] % GROUP == 0 and best_isa() is not None


def packed_four(codes: Tensor, scales: Tensor, middles: Tensor) -> Packed:
    """Pack W[n, k] = scales[n, g] * (codes[n, k] - 8) + middles[n, g], g = k // GROUP.

    Args:
        codes: int32 [N, K], 0 to 15, N a multiple of TILE and K of GROUP.
        scales: [N, K / GROUP], rounded to float16; `middles` likewise.
    """
    num_out, size = codes.shape
    tiles, blocks = num_out // TILE, size // GROUP
    # In each block, a weight row has four words of 32 bits with four pairs of columns each, a pair's codes 16 bits
    # apart.
    shifts = torch.tensor([[4 * step, 16 + 4 * step] for step in range(4)], dtype=torch.int32)
    words = (codes.view(tiles, TILE, blocks, 4, 4, 2) << shifts).sum((4, 5), dtype=torch.int32)
    of_groups = (groups.half().view(tiles, TILE, blocks).permute(0, 2, 1) for groups in (scales, middles))
    return _packed("four", num_out, size, words.permute(0, 2, 3, 1), *of_groups)


def packed_eight(codes: Tensor, scales: Tensor) -> Packed:
    """Pack W[n, k] = scales[n, g] * codes[n, k], g = k // GROUP.

    Args:
        codes: int8 [N, K], N a multiple of TILE and K of GROUP.
        scales: float32 [N, K / GROUP].
    """
    num_out, size = codes.shape
    tiles, blocks = num_out // TILE, size // GROUP
    # In each block, groups of four columns, each with 16 weight rows side by side.
    fours = codes.to(torch.int8).view(tiles, TILE, blocks, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    return _packed("eight", num_out, size, fours, scales.float().view(tiles, TILE, blocks).permute(0, 2, 1))


def eight_bits(weight: Tensor) -> Packed | None:
    """Pack a bfloat16 weight [out, in] that `fits` with eight bits, which halves the bytes to read.

    Each group must lie on 255 even levels around zero, as in weights made from GGUF's Q8_0: codes times scales, rounded
    to bfloat16, give the weights exactly. Returns None at the first group that does not.
    """
    weight = weight.contiguous()
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // GROUP)
    found = torch.zeros(1, dtype=torch.int64)
    find = row_function(needed_isa(), "find")
    find(weight.data_ptr(), scales.numel(), codes.data_ptr(), scales.data_ptr(), found.data_ptr())
    return packed_eight(codes, scales) if int(found) == scales.numel() else None


def round_to_eight_bits(weight: Tensor) -> None:
    """Round a bfloat16 weight [out, in] in place to the levels of `eight_bits`: a group's largest is on the last."""
    for part in weight.split(_ROUNDED * TILE):
        places = part.float().view(part.shape[0], -1, GROUP)
        scales = (places.abs().amax(2, keepdim=True) / LARGEST_CODE).half().float()
        codes = places.div_(scales.clamp(min=TINY)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
        part.copy_(codes.mul_(scales).view(part.shape))


def packed_half(weight: Tensor) -> Packed:
    """Pack bfloat16 weights [N, K], N a multiple of TILE and K of GROUP."""
    num_out, size = weight.shape
    # In each block, pairs of columns, each with 16 weight rows side by side.
    pairs = weight.view(num_out // TILE, TILE, size // GROUP, GROUP // 2, 2).permute(0, 2, 3, 1, 4)
    return _packed("half", num_out, size, pairs)


def _packed(kind: str, num_out: int, size: int, *parts: Tensor) -> Packed:
    """Return blocks made of these parts [tiles, blocks, ...], side by side."""
    count, block = num_out // TILE * (size // GROUP), BLOCKS[kind]
    before, behind = AHEAD * block, 2 * AHEAD * block
    memory = torch.zeros(before + count * block + behind + 64, dtype=torch.uint8)
    first = before + -(memory.data_ptr() + before) % 64
    found = memory[first : first + count * block]
    flat = [part.contiguous().view(torch.uint8).view(count, -1) for part in parts]
    places = found.view(count, block).split([part.shape[1] for part in flat], 1)
    for place, part in zip(places, flat, strict=True):
        place.copy_(part)
    return Packed(kind, found, num_out, size)


def tile_product(rows: Tensor, weight: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return rows @ W^T, [M, num_out] in bfloat16 or float32, for bfloat16 rows [M, K] with contiguous columns.

    Sums are float32 and rounded once, to `dtype`; a row's result does not depend on the rows beside it.
    """
    count, size = rows.shape
    if rows.stride(1) != 1 or rows.dtype != torch.bfloat16 or size != weight.size:
        raise ValueError(f"{rows.dtype} {tuple(rows.shape)} rows for weights [{weight.num_out}, {weight.size}]")
    if weight.kind == "four" and dtype == torch.float32:
        return tile_product(rows, weight).float()
    isa = needed_isa()
    out = torch.empty(count, weight.num_out, dtype=dtype)
    some = _TOGETHER if prepared_size(weight.kind, 1, size, isa) else max(count, 1)
    prepared = torch.empty(prepared_size(weight.kind, min(count, some), size, isa), dtype=torch.uint8)
    tiles, threads = weight.num_out // TILE, num_threads()
    chunk = max(1, -(-tiles // (_CHUNKS * threads))) if threads > 1 else tiles
    counters = torch.empty(COUNTERS, dtype=torch.uint8)
    x_stride, out_stride = rows.stride(0) * 2, weight.num_out * dtype.itemsize
    for first in range(0, count, some):
        _compiled(isa, weight.kind, dtype == torch.float32)(
            rows.data_ptr() + first * x_stride, x_stride, weight.blocks.data_ptr(), out.data_ptr() + first * out_stride,
            out_stride, size // GROUP, tiles, min(count - first, some), prepared.data_ptr(),
            chunk, -(-tiles // chunk), counters.data_ptr(), COUNTERS, *pool(threads),
        )  # fmt: skip
    return out


@cache
def _pool() -> Any:
    from kernels.cpu.pool import HelperThreads

    return HelperThreads()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Let torch's operations use one thread, and functions of kernels.cpu as many as torch's would, in this context.

    If other processes want the cores, each operation that several threads share waits until all of them have a core.
    """
    before, token = torch.get_num_threads(), _threads.set(num_threads())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _threads.reset(token)


_threads: ContextVar[int] = ContextVar("threads", default=0)


def num_threads() -> int:
    """Return the number of threads for functions of kernels.cpu: as many as torch's operations use, or would use."""
    return _threads.get() or torch.get_num_threads()


def pool(threads: int) -> tuple[int, int]:
    """Return the last arguments of functions that several threads run: the pool's address, and the most threads."""
    _pool().want(threads)
    return _pool().address, threads


def prepare(kind: str) -> None:
    """Compile the products with weights of a kind, which takes a third of a second, before they are needed."""
    for wide in (False,) if kind == "four" else (False, True):
        _compiled(needed_isa(), kind, wide)


def function_address(isa: Isa, kind: str, name: str) -> int:
    """Return the address of `prepare` or `tiles_<kind>` of `products_module`, with results in float32."""
    address: int = _compiled(isa, kind, True).engine.get_function_address(name)
    return address


@cache
def _compiled(isa: Isa, kind: str, wide: bool) -> Any:
    """Return the compiled function `product`."""
    from kernels.cpu import code

    engine = code.compiled(isa, part_of(isa, kind, wide))
    return code.function(engine, "product", len(_PRODUCT) + 2)


def part_of(isa: Isa, kind: str, wide: bool = False) -> dict[str, Callable[[], Any]]:
    """Return what makes `products_module`, by its name: the same object for all functions that call it."""
    return {f"products {kind} {wide}": partial(products_module, isa, kind, wide)}


def products_module(isa: Isa, kind: str, wide: bool = False) -> Any:
    """Write `tiles_<kind>` of TILES_ARGS, `prepare` of PREPARE_ARGS, and `product`, which calls them in all threads.

    `wide`: results are float32.
    """
    from kernels.cpu.code import Code, Module, optimized
    from kernels.cpu.pool import write_call
    from kernels.cpu.tiles import write_tiles
    from kernels.cpu.vectors import write_products

    module = Module(isa)
    part = Code(module, "part", ["array", "me"])
    given = part.fields(part.args["array"], _PRODUCT)
    (write_tiles if isa.has_tiles else write_products)(module, kind, wide)
    # Each thread prepares the rows for itself: they are few.
    part.run("prepare", *(given[name] for name in PREPARE_ARGS))
    with part.chunks(given["chunks"], given["counters"]) as chunk:
        given["first"], given["last"] = part.bounds(chunk, given["chunk"], given["tiles"])
        part.run(f"tiles_{kind}", *(given[name] for name in TILES_ARGS))
    part.done()
    write_call(module, "product", _PRODUCT, "part")
    return optimized(module, is_straight=not isa.has_tiles)
