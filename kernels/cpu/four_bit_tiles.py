"""Products with weights of four bits by tiles.

Codes become bfloat16 integers by a table in a register, two of them in a shift and a permutation; each group's sums are
scaled in float32.

The code is LLVM's assembly (llvm.org/docs/LangRef.html). A loop's step is a block of 32 columns of 16 weight rows. So
that no instruction waits for what the one before it wrote, step i makes block i + 2 wide, multiplies block i and adds
up block i - 2, whose product lies where that of i + 2 will.
"""

from __future__ import annotations

import torch

from kernels.cpu.code import Code, Module
from kernels.cpu.layout import BLOCKS, PREPARE, TILE, TILES
from kernels.cpu.tiles import call_variants

_VARIANTS = (1, 4, 8, 16)
"""Rows that products are compiled for."""
_BLOCK = BLOCKS["four"]
"""Bytes of a block: codes, and 16 scales and middles in float16."""
_FETCHED = 32
"""Blocks that are asked of memory before they are made wide: processors by themselves ask for less."""
_AHEAD = 2
"""Blocks that are made wide before they are multiplied, and multiplied before they are added up."""
# What a call keeps on the stack, in bytes: four blocks of wide weights, as many of products, a tile of ones, and the
# tiles' configuration. Places of rows that are not there are zeros: processors take long for numbers as small as what
# may lie there.
_PRODUCTS, _ONES, _CONFIG, _STACK = 4096, 8192, 9216, 9280
_T_PRODUCT, _T_ROWS, _T_WEIGHTS = 0, 1, 2
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


def write_calls(module: Module) -> None:
    """`tiles_four` of TILES and `prepare` of PREPARE: for any number of rows."""
    for name, names in (("tiles_four", TILES), ("prepare", PREPARE)):
        call_variants(Code(module, name, names), name, _VARIANTS, 4)


def assembly() -> str:
    """The functions for up to so many rows, in LLVM's assembly."""
    return _DECLARED + "".join(_sums_of(rows) + _tiles_of(rows) for rows in _VARIANTS)


def _tiles_of(rows: int) -> str:
    """Some tiles of 16 weight rows."""
    return f"""
define void @tiles_four_{rows}({", ".join(f"i64 %{name}_i" for name in TILES)}) #0 {{
begin:
{_arguments(TILES)}
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
define void @prepare_{rows}({", ".join(f"i64 %{name}_i" for name in PREPARE)}) #0 {{
begin:
{_arguments(PREPARE)}{_stack()}"""
    for row in range(TILE):
        code += _at(f"one_{row}", "ones", 64 * row)
        code += f" store <32 x i16> {_vector('i16', [0x3F80] * 32)}, ptr %one_{row}, align 64\n"
    code += f""" call void @llvm.x86.tileloadd64(i8 {_T_WEIGHTS}, ptr %ones, i64 64)
 br label %sum
sum:
 %s = phi i64 [0, %begin], [%s_next, %sum]
 %s_bytes = shl i64 %s, 6
{_at("s_rows", "x", "%s_bytes")}{_multiply("s_rows", "products")}{_at("s_to", "prepared", "%s_bytes")}"""
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
        code += f" %{name} = inttoptr i64 %{name}_i to ptr\n" if name in ("x", "w", "y", "prepared") else ""
        code += f" %{name} = add i64 %{name}_i, 0\n" if name not in ("x", "w", "y", "prepared") else ""
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
    code += " %k_added_bytes = shl i64 %k_added, 6\n" + _at("group_sums", "prepared", "%k_added_bytes")
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
