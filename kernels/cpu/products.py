"""Products of few rows on a CPU by the tile instructions (AMX) of Intel's since 2023, with weights of 4 or 16 bits.

A tile of AMX holds 16 rows of 64 bytes, and one instruction multiplies 16 rows of 32 columns in bfloat16 with those of
16 weight rows. So sixteen rows take hardly longer than one, which is bound by the reading of the weights; torch's own
product of four bits takes as often as long as there are fours of rows. Here is the product with weights of four bits,
that of bfloat16 is in kernels.cpu.tiles. Codes become bfloat16 integers by a table in a register, two of them in a
shift and a permutation; each group's sums are scaled in float32.

The code below is LLVM's assembly (llvm.org/docs/LangRef.html), compiled by llvmlite when the first product is made. A
loop's step is a block of 32 columns of 16 weight rows. So that no instruction waits for what the one before it wrote,
step i makes block i + 2 wide, multiplies block i and adds up block i - 2, whose product lies where that of i + 2 will.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.cpu.code import Code

MAX_ROWS = 64
"""Rows that a product with weights of four bits takes at most: they are read for every 16."""
GROUP = 32
"""Columns that a product sums before they are scaled."""
TILE = 16
"""Weight rows of a block."""
_VARIANTS = (1, 4, 8, 16)
"""Rows that products are compiled for."""
_BLOCK = 320
"""Bytes of a block of four bits: codes, and 16 scales and middles in float16."""
BLOCKS = {"four": _BLOCK, "half": 1024}
"""Bytes of a block, by the kind of weights."""
_FETCHED = 32
"""Blocks that are asked of memory before they are made wide: processors by themselves ask for less."""
_AHEAD = 2
"""Blocks that are made wide before they are multiplied, and multiplied before they are added up."""
_MOST = _VARIANTS[-1]
_CHUNKS = 4
"""Pieces of a product for each thread."""
_COUNTERS = 128
"""Bytes of counters: pieces taken, and, in a cache line of its own, pieces done."""
# What a call keeps on the stack, in bytes: four blocks of wide weights, as many of products, a tile of ones, and the
# tiles' configuration. Places of rows that are not there are zeros: processors take long for numbers as small as what
# may lie there.
_PRODUCTS, _ONES, _CONFIG, _STACK = 4096, 8192, 9216, 9280
_T_PRODUCT, _T_ROWS, _T_WEIGHTS = 0, 1, 2
_SUMS_OF = ("x", "row_stride", "blocks", "count", "sums")
_TILES = ("x", "row_stride", "w", "y", "out_stride", "blocks", "first", "last", "count", "sums")
"""See kernels.cpu.tiles.TILE_ARGUMENTS, which are the same."""
_PRODUCT = (
    "x",
    "row_stride",
    "w",
    "y",
    "out_stride",
    "blocks",
    "tiles",
    "count",
    "sums",
    "chunk",
    "chunks",
    "counters",
)
_DECLARED = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
attributes #0 = { nounwind }
"""


@cache
def has_amx() -> bool:
    """Whether products run here: on Linux, with AMX and llvmlite."""
    if sys.platform != "linux" or not torch.cpu._is_amx_tile_supported() or find_spec("llvmlite") is None:
        return False
    return bool(torch.cpu._init_amx())


class Packed(NamedTuple):
    """A matrix [num_out, size] as products read it.

    `kind`: "four" or "half", for 4 or 16 bits a weight.
    """

    kind: str
    blocks: Tensor
    num_out: int
    size: int


def fits(weight: Tensor) -> bool:
    """Whether weights of this shape can be packed so, and multiplied here: [out, in] in bfloat16, on a CPU."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return weight.shape[0] % TILE == 0 and weight.shape[1] % GROUP == 0 and has_amx()


def packed_four(codes: Tensor, scales: Tensor, middles: Tensor) -> Packed:
    """W[n, k] = scales[n, g] * (codes[n, k] - 8) + middles[n, g], g = k // GROUP.

    Args:
        codes: int32 [N, K], 0 to 15, N a multiple of TILE and K of GROUP.
        scales: [N, K / GROUP], rounded to float16, as `middles`.
    """
    num_out, size = codes.shape
    tiles, blocks = num_out // TILE, size // GROUP
    # Of each weight row eight pairs of columns lie in four words of 32 bits, a pair's codes 16 bits apart.
    shifts = torch.tensor([[4 * step, 16 + 4 * step] for step in range(4)], dtype=torch.int32)
    words = (codes.view(tiles, TILE, blocks, 4, 4, 2) << shifts).sum((4, 5), dtype=torch.int32)
    of_groups = (groups.half().view(tiles, TILE, blocks).permute(0, 2, 1) for groups in (scales, middles))
    return _packed("four", num_out, size, words.permute(0, 2, 3, 1), *of_groups)


def packed_half(weight: Tensor) -> Packed:
    """bfloat16 weights [N, K], N a multiple of TILE and K of GROUP."""
    return _packed("half", *weight.shape, _pairs(weight))


def _pairs(weight: Tensor) -> Tensor:
    """Of each block pairs of columns, each of 16 weight rows side by side."""
    num_out, size = weight.shape
    return weight.view(num_out // TILE, TILE, size // GROUP, TILE, 2).permute(0, 2, 3, 1, 4)


def _packed(kind: str, num_out: int, size: int, *parts: Tensor) -> Packed:
    """Blocks of these parts [tiles, blocks, ...], side by side."""
    count, block = num_out // TILE * (size // GROUP), BLOCKS[kind]
    # Blocks before the first and behind the last are read, and not used.
    before, behind = _AHEAD * block, 2 * _AHEAD * block
    memory = torch.zeros(before + count * block + behind + 64, dtype=torch.uint8)
    first = before + -(memory.data_ptr() + before) % 64
    found = memory[first : first + count * block]
    flat = [part.contiguous().view(torch.uint8).view(count, -1) for part in parts]
    places = found.view(count, block).split([part.shape[1] for part in flat], 1)
    for place, part in zip(places, flat, strict=True):
        place.copy_(part)
    return Packed(kind, found, num_out, size)


def tile_product(rows: Tensor, weight: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """rows W^T, [M, num_out] in bfloat16 or float32, for bfloat16 [M, K] whose columns are contiguous. M is MAX_ROWS at
    most with weights of four bits.

    Sums are float32 and rounded once, to `dtype`; a row's result does not depend on the rows beside it.
    """
    count, size = rows.shape
    if rows.stride(1) != 1 or rows.dtype != torch.bfloat16 or size != weight.size:
        raise ValueError(f"{rows.dtype} {tuple(rows.shape)} rows for weights [{weight.num_out}, {weight.size}]")
    if weight.kind == "four" and count > MAX_ROWS:
        raise ValueError(f"{count} rows; {MAX_ROWS} can be taken with weights of four bits")
    if weight.kind == "four" and dtype == torch.float32:
        return tile_product(rows, weight).float()
    out = torch.empty(count, weight.num_out, dtype=dtype)
    sums = torch.empty(-(-count // _MOST) * size // GROUP, _MOST) if weight.kind == "four" else out
    tiles, threads = weight.num_out // TILE, num_threads()
    chunk = max(1, -(-tiles // (_CHUNKS * threads))) if threads > 1 else tiles
    counters = torch.empty(_COUNTERS, dtype=torch.uint8)
    if count:
        _compiled(weight.kind, dtype == torch.float32)(
            rows.data_ptr(), rows.stride(0) * 2, weight.blocks.data_ptr(),
            out.data_ptr(), weight.num_out * dtype.itemsize, size // GROUP, tiles, count, sums.data_ptr(),
            chunk, -(-tiles // chunk), counters.data_ptr(), *pool(threads),
        )  # fmt: skip
    return out


@cache
def _pool() -> Any:
    from kernels.cpu.pool import HelperThreads

    return HelperThreads()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Within, torch's operations take one thread, and the functions of kernels.cpu as many as torch's would.

    Where other processes want the cores, each operation that several threads share waits until all of these have one.
    """
    outer = _threads.get()
    count = num_threads()
    _threads.set(count)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _threads.set(outer)


_threads: ContextVar[int] = ContextVar("threads", default=0)


def num_threads() -> int:
    """Threads of the functions of kernels.cpu: as many as torch's operations take, or would."""
    return _threads.get() or torch.get_num_threads()


def pool(threads: int) -> tuple[int, int]:
    """The last arguments of functions that several threads run: where these are told, and how many there may be."""
    _pool().want(threads)
    return _pool().address, threads


@cache
def _compiled(kind: str, wide: bool) -> Any:
    """What multiplies, and the memory that its code lies in."""
    from kernels.cpu import code

    if not has_amx():
        raise RuntimeError("these products need Linux, a processor with AMX, and llvmlite")
    engine = code.compiled(*modules(kind, wide))
    found = code.function(engine, "product", len(_PRODUCT) + 2)
    found.engine = engine
    return found


def modules(kind: str, wide: bool = False) -> list[Any]:
    """All functions: `tiles_four` or the like of _TILES, `sums` of _SUMS_OF, and `product`, which calls them in all
    threads. `wide`: of products in float32."""
    from llvmlite import binding, ir

    from kernels.cpu.code import Code, made
    from kernels.cpu.pool import write_call
    from kernels.cpu.tiles import write_tiles

    module = ir.Module()
    tiles = f"tiles_{kind}"
    part = Code(module, "part", ["array", "me"])
    given = part.fields(part.args["array"], _PRODUCT)
    if kind == "four":
        for name, names in ((tiles, _TILES), ("sums", _SUMS_OF)):
            _of_all_rows(Code(module, name, names), name)
        # Each thread for itself: they are few.
        part.run("sums", *(given[name] for name in _SUMS_OF))
    else:
        write_tiles(module, tiles, wide)
    with part.chunks(given["chunks"], given["counters"], 0, _COUNTERS // 2) as chunk:
        given["first"] = part.times(chunk, given["chunk"])
        given["last"] = part.least(part.plus(given["first"], given["chunk"]), given["tiles"])
        part.run(tiles, *(given[name] for name in _TILES))
    part.done()
    write_call(module, "product", _PRODUCT, "part", ("counters", _COUNTERS, ""))
    found = made(module)
    return [binding.parse_assembly(assembly()), found] if kind == "four" else [found]


def _of_all_rows(code: Code, name: str) -> None:
    """Any number of rows: 16 at a time, by the function for as many or some more."""
    args = code.args
    with code.loop(0, args["count"], _MOST) as row:
        given = dict(args)
        given["count"] = some = code.least(code.build.sub(args["count"], row), _MOST)
        given["x"] = code.plus(args["x"], code.times(row, args["row_stride"]))
        given["sums"] = code.plus(args["sums"], code.times(row, code.times(args["blocks"], 4)))
        if "y" in given:
            given["y"] = code.plus(args["y"], code.times(row, args["out_stride"]))
        for least, most in zip((0, *_VARIANTS), _VARIANTS, strict=False):
            with code.when(code.between(least, some, most)):
                code.run(f"{name}_{most}", *given.values())
    code.done()


def assembly() -> str:
    """The functions for up to so many rows, in LLVM's assembly."""
    return _DECLARED + "".join(_sums_of(rows) + _tiles_of(rows) for rows in _VARIANTS)


def _tiles_of(rows: int) -> str:
    """Some tiles of 16 weight rows."""
    return f"""
define void @tiles_four_{rows}({", ".join(f"i64 %{name}_i" for name in _TILES)}) #0 {{
begin:
{_arguments(_TILES)}
 %nothing = icmp sge i64 %first, %last
 br i1 %nothing, label %leave, label %start
{_loop(rows)}
end:
 call void @llvm.x86.tilerelease()
 br label %leave
leave:
 ret void
}}
"""


def _at(name: str, base: str, offset: int | str) -> str:
    return f" %{name} = getelementptr i8, ptr %{base}, i64 {offset}\n"


def _vector(kind: str, values: list[int]) -> str:
    return f"<{', '.join(f'{kind} {value}' for value in values)}>"


def _multiply(rows: str, to: str) -> str:
    """A block of rows times the tile of weights."""
    return f""" call void @llvm.x86.tilezero(i8 {_T_PRODUCT})
 call void @llvm.x86.tileloadd64(i8 {_T_ROWS}, ptr %{rows}, i64 %row_stride)
 call void @llvm.x86.tdpbf16ps(i8 {_T_PRODUCT}, i8 {_T_ROWS}, i8 {_T_WEIGHTS})
 call void @llvm.x86.tilestored64(i8 {_T_PRODUCT}, ptr %{to}, i64 64)
"""


def _sums_of(rows: int) -> str:
    """Sums of each row's groups, which middles are multiplied with: products with ones. 16 for each block."""
    code = f"""
define void @sums_{rows}({", ".join(f"i64 %{name}_i" for name in _SUMS_OF)}) #0 {{
begin:
{_arguments(_SUMS_OF)}{_stack()}"""
    for row in range(TILE):
        code += _at(f"one_{row}", "ones", 64 * row)
        code += f" store <32 x i16> {_vector('i16', [0x3F80] * 32)}, ptr %one_{row}, align 64\n"
    code += f""" call void @llvm.x86.tileloadd64(i8 {_T_WEIGHTS}, ptr %ones, i64 64)
 br label %sum
sum:
 %s = phi i64 [0, %begin], [%s_next, %sum]
 %s_bytes = shl i64 %s, 6
{_at("s_rows", "x", "%s_bytes")}{_multiply("s_rows", "products")}{_at("s_to", "sums", "%s_bytes")}"""
    for row in range(rows):
        code += _at(f"s_{row}", "products", 64 * row) + f" %s_value_{row} = load float, ptr %s_{row}\n"
        code += _at(f"s_to_{row}", "s_to", 4 * row) + f" store float %s_value_{row}, ptr %s_to_{row}\n"
    return (
        code
        + """ %s_next = add i64 %s, 1
 %s_done = icmp eq i64 %s_next, %blocks
 br i1 %s_done, label %end, label %sum
end:
 call void @llvm.x86.tilerelease()
 ret void
}
"""
    )


def _arguments(names: tuple[str, ...]) -> str:
    """Addresses as pointers, numbers as they are."""
    code = ""
    for name in names:
        code += f" %{name} = inttoptr i64 %{name}_i to ptr\n" if name in ("x", "w", "y", "sums") else ""
        code += f" %{name} = add i64 %{name}_i, 0\n" if name not in ("x", "w", "y", "sums") else ""
    return code


def _stack() -> str:
    """What is kept there, and tiles of 64 bytes: as many rows of products and rows as there are, 16 of weights."""
    code = f" %wide = alloca i8, i64 {_STACK}, align 64\n"
    code += _at("products", "wide", _PRODUCTS) + _at("ones", "wide", _ONES)
    code += f" call void @llvm.memset.p0.i64(ptr %products, i8 0, i64 {_STACK - _PRODUCTS}, i1 false)\n"
    code += _at("config", "wide", _CONFIG) + " store i8 1, ptr %config\n %height = trunc i64 %count to i8\n"
    for tile, height in ((_T_PRODUCT, "%height"), (_T_ROWS, "%height"), (_T_WEIGHTS, str(TILE))):
        code += _at(f"width_{tile}", "config", 16 + 2 * tile) + f" store i16 64, ptr %width_{tile}\n"
        code += _at(f"height_{tile}", "config", 48 + tile) + f" store i8 {height}, ptr %height_{tile}\n"
    return code + " call void @llvm.x86.ldtilecfg(ptr %config)\n"


def _widen(name: str, block: str, to: str) -> str:
    """A block's codes as bfloat16, less 8. Permutations look at five bits: the table stands in them twice."""
    integers = [int(torch.tensor(code - 8.0).view(torch.int32)) >> 16 & 0xFFFF for code in range(16)] * 2
    code = ""
    for pair in range(TILE):
        words = f"{name}_words_{pair // 4}"
        if pair % 4 == 0:
            code += _at(f"{words}_at", block, 16 * pair) + f" %{words} = load <32 x i16>, ptr %{words}_at, align 64\n"
        else:
            shifts = _vector("i16", [4 * (pair % 4)] * 32)
            code += f" %{name}_index_{pair} = lshr <32 x i16> %{words}, {shifts}\n"
        index = words if pair % 4 == 0 else f"{name}_index_{pair}"
        code += f" %{name}_{pair} = call <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16> "
        code += f"{_vector('i16', integers)}, <32 x i16> %{index})\n"
        code += _at(f"{name}_to_{pair}", to, 64 * pair)
        code += f" store <32 x i16> %{name}_{pair}, ptr %{name}_to_{pair}, align 64\n"
    return code


def _loop(rows: int) -> str:
    """Over all blocks of all tiles. Totals of the first steps are of nothing, and given up when `left` has run out."""
    totals = "".join(
        f" %total_{row} = phi <16 x float> [zeroinitializer, %start], [%kept_{row}, %next]\n" for row in range(rows)
    )
    kept = "".join(
        f" %kept_{row} = phi <16 x float> [%sum_{row}, %step], [zeroinitializer, %given]\n" for row in range(rows)
    )
    return f"""start:
{_stack()} %tile_size = mul i64 %blocks, {_BLOCK}
 %w_skip = mul i64 %tile_size, %first
{_at("w_first", "w", "%w_skip")}{_at("w_second", "w_first", _BLOCK)}{_at("wide_second", "wide", 1024)}
{_widen("a", "w_first", "wide")}{_widen("b", "w_second", "wide_second")}
 %mine = sub i64 %last, %first
 %products_due = mul i64 %mine, %blocks
 %steps = add i64 %products_due, {_AHEAD}
 %before = sub i64 %first, 1
 br label %step
step:
 %i = phi i64 [0, %start], [%i_next, %next]
 %k = phi i64 [0, %start], [%k_next, %next]
 %k_added = phi i64 [-{_AHEAD}, %start], [%k_added_next, %next]
 %left = phi i64 [{_AHEAD}, %start], [%left_next, %next]
 %tile = phi i64 [%before, %start], [%tile_next, %next]
{totals} %i_bytes = mul i64 %i, {_BLOCK}
{_at("block", "w_first", "%i_bytes")}{_at("block_ahead", "block", _AHEAD * _BLOCK)}
{_at("block_behind", "block", -_AHEAD * _BLOCK)}{_fetch("block_ahead")}
 %i_ahead = add i64 %i, {_AHEAD}
 %place = and i64 %i, 3
 %place_ahead = and i64 %i_ahead, 3
 %place_bytes = shl i64 %place, 10
 %ahead_bytes = shl i64 %place_ahead, 10
{_at("wide_ahead", "wide", "%ahead_bytes")}{_widen("c", "block_ahead", "wide_ahead")}
{_at("wide_now", "wide", "%place_bytes")}{_at("product_now", "products", "%place_bytes")}
 call void @llvm.x86.tileloadd64(i8 {_T_WEIGHTS}, ptr %wide_now, i64 64)
 %k_bytes = shl i64 %k, 6
{_at("x_now", "x", "%k_bytes")}{_multiply("x_now", "product_now")}{_add_up(rows)}
 %k_1 = add i64 %k, 1
 %k_ends = icmp eq i64 %k_1, %blocks
 %k_next = select i1 %k_ends, i64 0, i64 %k_1
 %k_added_1 = add i64 %k_added, 1
 %left_1 = sub i64 %left, 1
 %tile_ends = icmp eq i64 %left_1, 0
 br i1 %tile_ends, label %whole, label %next
{_write(rows)}
next:
 %left_next = phi i64 [%left_1, %step], [%blocks, %given]
 %tile_next = phi i64 [%tile, %step], [%tile_1, %given]
 %k_added_next = phi i64 [%k_added_1, %step], [0, %given]
{kept} %i_next = add i64 %i, 1
 %done = icmp eq i64 %i_next, %steps
 br i1 %done, label %end, label %step"""


def _fetch(block: str) -> str:
    """Ask for a block some way behind another."""
    code = ""
    for line in range(_BLOCK // 64):
        code += _at(f"line_{line}", block, _FETCHED * _BLOCK + 64 * line)
        code += f" call void @llvm.prefetch.p0(ptr %line_{line}, i32 0, i32 3, i32 1)\n"
    return code


def _add_up(rows: int) -> str:
    """scale * product + middle * sum of the row's group, to each row's totals."""
    code = _at("scales_at", "block_behind", 256) + _at("middles_at", "block_behind", 288)
    code += _at("product", "products", "%ahead_bytes")
    for name in ("scale", "middle"):
        code += f" %{name}_half = load <16 x half>, ptr %{name}s_at, align 32\n"
        code += f" %{name} = fpext <16 x half> %{name}_half to <16 x float>\n"
    code += " %k_added_bytes = shl i64 %k_added, 6\n" + _at("group_sums", "sums", "%k_added_bytes")
    for row in range(rows):
        code += _at(f"product_at_{row}", "product", 64 * row) + _at(f"group_at_{row}", "group_sums", 4 * row)
        code += f""" %product_{row} = load <16 x float>, ptr %product_at_{row}, align 64
 %group_{row} = load float, ptr %group_at_{row}
 %one_group_{row} = insertelement <16 x float> poison, float %group_{row}, i32 0
 %groups_{row} = shufflevector <16 x float> %one_group_{row}, <16 x float> poison, <16 x i32> zeroinitializer
"""
        code += _fma(f"moved_{row}", "middle", f"groups_{row}", f"total_{row}")
        code += _fma(f"sum_{row}", "scale", f"product_{row}", f"moved_{row}")
    return code


def _fma(name: str, first: str, second: str, third: str) -> str:
    factors = f"<16 x float> %{first}, <16 x float> %{second}, <16 x float> %{third}"
    return f" %{name} = call <16 x float> @llvm.fma.v16f32({factors})\n"


def _write(rows: int) -> str:
    """Totals of a tile, rounded, row by row as far as there are any."""
    code = """whole:
 %is_none = icmp slt i64 %tile, %first
 br i1 %is_none, label %given, label %write_0
write_0:
 %out_bytes = shl i64 %tile, 5
""" + _at("out_tile", "y", "%out_bytes")
    for row in range(rows):
        code += f"write_{row}:\n" if row else ""
        code += f" %rounded_{row} = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %sum_{row})\n"
        code += f" %out_skip_{row} = mul i64 %out_stride, {row}\n" + _at(f"out_{row}", "out_tile", f"%out_skip_{row}")
        code += f" store <16 x bfloat> %rounded_{row}, ptr %out_{row}, align 2\n"
        if row + 1 < rows:
            code += f" %more_{row} = icmp sgt i64 %count, {row + 1}\n"
            code += f" br i1 %more_{row}, label %write_{row + 1}, label %given\n"
    return code + " br label %given\ngiven:\n %tile_1 = add i64 %tile, 1\n br label %next"
