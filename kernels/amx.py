"""Products of few rows with weights of four bits on a CPU, by the tile instructions (AMX) of Intel's since 2023.

A tile of AMX holds 16 rows of 64 bytes, and one instruction multiplies 16 rows of 32 columns in bfloat16 with those of
16 weight rows. So sixteen rows take hardly longer than one, which is bound by the reading of the weights; torch's own
product of four bits takes as often as long as there are fours of rows. Codes become bfloat16 integers by a table in a
register, two of them in a shift and a permutation; each group's sums are scaled in float32.

The code below is LLVM's assembly (llvm.org/docs/LangRef.html), compiled by llvmlite when the first product is made. A
loop's step is a block of 32 columns of 16 weight rows. So that no instruction waits for what the one before it wrote,
step i makes block i + 2 wide, multiplies block i and adds up block i - 2, whose product lies where that of i + 2 will.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 32
"""Rows that a product takes at most: weights are read for every 16."""
GROUP = 32
"""Columns that a product sums before they are scaled."""
TILE = 16
"""Weight rows of a block."""
_VARIANTS = (1, 4, 8, 16)
"""Rows that products are compiled for."""
_BLOCK = 320
"""Bytes of a block: codes, and 16 scales and middles in float16."""
_FETCHED = 32
"""Blocks that are asked of memory before they are made wide: processors by themselves ask for less."""
_AHEAD = 2
"""Blocks that are made wide before they are multiplied, and multiplied before they are added up."""
# What a call keeps on the stack, in bytes: four blocks of wide weights, as many of products, a tile of ones, the tiles'
# configuration, and behind room for what is read in vain, the sums of each row's groups. Places of rows that are not
# there are zeros: processors take long for numbers as small as what may lie there.
_PRODUCTS, _ONES, _CONFIG, _SUMS = 4096, 8192, 9216, 9472
_T_PRODUCT, _T_ROWS, _T_WEIGHTS = 0, 1, 2
_ARGUMENTS = ("rows", "row_stride", "weights", "out", "out_stride", "blocks", "tiles", "count")
"""Of a product, all int64: addresses, strides in bytes, blocks of a tile, tiles, and rows."""
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
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
attributes #0 = { nounwind "target-cpu"="sapphirerapids" "prefer-vector-width"="512" }
"""


@cache
def has_amx() -> bool:
    """Whether products run here: on Linux, with AMX and llvmlite."""
    if sys.platform != "linux" or not torch.cpu._is_amx_tile_supported() or find_spec("llvmlite") is None:
        return False
    return bool(torch.cpu._init_amx())


def packed_blocks(codes: Tensor, scales: Tensor, middles: Tensor) -> Tensor:
    """uint8: what products read of W[n, k] = scales[n, g] * (codes[n, k] - 8) + middles[n, g], g = k // GROUP.

    Args:
        codes: int32 [N, K], 0 to 15, N a multiple of TILE and K of GROUP.
        scales: [N, K / GROUP], rounded to float16, as `middles`.
    """
    num_out, size = codes.shape
    tiles, blocks = num_out // TILE, size // GROUP
    # Of each weight row eight pairs of columns lie in four words of 32 bits, a pair's codes 16 bits apart.
    shifts = torch.tensor([[4 * step, 16 + 4 * step] for step in range(4)], dtype=torch.int32)
    words = (codes.view(tiles, TILE, blocks, 4, 4, 2) << shifts).sum((4, 5), dtype=torch.int32)
    parts = [words.permute(0, 2, 3, 1)]
    for of_groups in (scales, middles):
        parts.append(of_groups.half().view(tiles, TILE, blocks).permute(0, 2, 1))
    # Blocks before the first and behind the last are read, and not used.
    before, behind, size = _AHEAD * _BLOCK, 2 * _AHEAD * _BLOCK, tiles * blocks * _BLOCK
    memory = torch.zeros(before + size + behind + 64, dtype=torch.uint8)
    first = before + -(memory.data_ptr() + before) % 64
    found = memory[first : first + size]
    places = found.view(tiles * blocks, _BLOCK).split((_BLOCK - 64, 32, 32), 1)
    for place, part in zip(places, parts, strict=True):
        place.copy_(part.contiguous().view(torch.uint8).view(tiles * blocks, -1))
    return found


def four_bit_product(rows: Tensor, blocks: Tensor, num_out: int) -> Tensor:
    """rows W^T, [M, num_out] in bfloat16, for bfloat16 [M, K] whose columns are contiguous, 1 <= M <= MAX_ROWS.

    Sums are float32 and rounded once; a row's result does not depend on the rows beside it.
    """
    count, size = rows.shape
    if not 1 <= count <= MAX_ROWS or rows.stride(1) != 1 or rows.dtype != torch.bfloat16:
        raise ValueError(f"{rows.dtype} {tuple(rows.shape)} rows; 1 to {MAX_ROWS} in bfloat16 can be taken")
    if size % GROUP or num_out % TILE or blocks.numel() != size // GROUP * (num_out // TILE) * _BLOCK:
        raise ValueError(f"{blocks.numel()} bytes of blocks are no weights of [{num_out}, {size}]")
    out = torch.empty(count, num_out, dtype=torch.bfloat16)
    for first in range(0, count, _VARIANTS[-1]):
        some = min(count - first, _VARIANTS[-1])
        _compiled(some)(
            rows.data_ptr() + first * rows.stride(0) * 2, rows.stride(0) * 2, blocks.data_ptr(),
            out.data_ptr() + first * num_out * 2, num_out * 2, size // GROUP, num_out // TILE, some,
            torch.get_num_threads(),
        )  # fmt: skip
    return out


@cache
def _engine() -> Any:
    """What holds the memory of the functions."""
    import llvmlite.binding as llvm

    if not has_amx():
        raise RuntimeError("products with weights of four bits need Linux, a processor with AMX, and llvmlite")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Torch's own threads: others would be in their way.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(assembly()), _machine())
    engine.finalize_object()
    return engine


@cache
def _compiled(count: int) -> Any:
    """The function for so many rows: of _ARGUMENTS, and int32 for threads."""
    rows = next(most for most in _VARIANTS if most >= count)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(_ARGUMENTS), ctypes.c_int32)
    return kind(_engine().get_function_address(f"product_{rows}"))


def _machine() -> Any:
    import llvmlite.binding as llvm

    return llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu="sapphirerapids", opt=2)


def assembly() -> str:
    """All functions, in LLVM's assembly."""
    return _DECLARED + "".join(_entry(rows) + _part(rows) for rows in _VARIANTS)


def _entry(rows: int) -> str:
    """What is called: its arguments laid where all threads find them."""
    stores = "".join(f"{place} store i64 %{name}, ptr %at_{name}\n" for name, place in _places())
    return f"""
define void @product_{rows}({", ".join(f"i64 %{name}" for name in _ARGUMENTS)}, i32 %threads) #0 {{
 %all = alloca [{len(_ARGUMENTS)} x i64], align 64
{stores} call void @GOMP_parallel(ptr @part_{rows}, ptr %all, i32 %threads, i32 0)
 ret void
}}
"""


def _places() -> list[tuple[str, str]]:
    """Arguments, and the code that finds where each lies."""
    return [(name, _at(f"at_{name}", "all", 8 * index)) for index, name in enumerate(_ARGUMENTS)]


def _part(rows: int) -> str:
    """A thread's tiles of 16 weight rows."""
    loads = "".join(f"{place} %{name} = load i64, ptr %at_{name}\n" for name, place in _places())
    return f"""
define void @part_{rows}(ptr %all) #0 {{
entry:
{loads} %me_i = call i32 @omp_get_thread_num()
 %team_i = call i32 @omp_get_num_threads()
 %me = zext i32 %me_i to i64
 %team = zext i32 %team_i to i64
 %next_me = add i64 %me, 1
 %share = mul i64 %tiles, %me
 %first = udiv i64 %share, %team
 %next_share = mul i64 %tiles, %next_me
 %last = udiv i64 %next_share, %team
 %nothing = icmp eq i64 %first, %last
 br i1 %nothing, label %leave, label %begin
begin:
 %x = inttoptr i64 %rows to ptr
 %w = inttoptr i64 %weights to ptr
 %y = inttoptr i64 %out to ptr
 %sums_size = shl i64 %blocks, 6
 %size = add i64 %sums_size, {_SUMS}
 %wide = alloca i8, i64 %size, align 64
{_at("products", "wide", _PRODUCTS)}{_at("ones", "wide", _ONES)}{_at("sums", "wide", _SUMS)}\
 call void @llvm.memset.p0.i64(ptr %products, i8 0, i64 {_SUMS - _PRODUCTS}, i1 false)
{_configure()}
{_row_sums(rows)}
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


def _configure() -> str:
    """Tiles of 64 bytes: as many rows of products and rows as there are, 16 of weights."""
    code = _at("config", "wide", _CONFIG)
    code += " store i8 1, ptr %config\n"
    code += " %height = trunc i64 %count to i8\n"
    for tile, height in ((_T_PRODUCT, "%height"), (_T_ROWS, "%height"), (_T_WEIGHTS, str(TILE))):
        code += _at(f"width_{tile}", "config", 16 + 2 * tile) + f" store i16 64, ptr %width_{tile}\n"
        code += _at(f"height_{tile}", "config", 48 + tile) + f" store i8 {height}, ptr %height_{tile}\n"
    return code + " call void @llvm.x86.ldtilecfg(ptr %config)"


def _multiply(rows: str, to: str) -> str:
    """A block of rows times the tile of weights."""
    return f""" call void @llvm.x86.tilezero(i8 {_T_PRODUCT})
 call void @llvm.x86.tileloadd64(i8 {_T_ROWS}, ptr %{rows}, i64 %row_stride)
 call void @llvm.x86.tdpbf16ps(i8 {_T_PRODUCT}, i8 {_T_ROWS}, i8 {_T_WEIGHTS})
 call void @llvm.x86.tilestored64(i8 {_T_PRODUCT}, ptr %{to}, i64 64)
"""


def _row_sums(rows: int) -> str:
    """Sums of each row's groups, which middles are multiplied with: products with ones."""
    code = ""
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
    code += " %s_next = add i64 %s, 1\n %s_done = icmp eq i64 %s_next, %blocks\n"
    return code + " br i1 %s_done, label %start, label %sum"


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
 %tile_size = mul i64 %blocks, {_BLOCK}
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
