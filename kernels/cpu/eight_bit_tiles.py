"""Products with weights of eight bits by tiles.

Rows become integers too, of 15 bits, with a scale for each group of 32 columns: a high and a low part of eight bits,
which lie as two rows of a tile. So sums of a group are exact, and what is lost is less than bfloat16 loses in the row
itself. Each group's sums are scaled in float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.cpu.code import F32, I8, I64, VECTOR, WORDS, Code, Module, words
from kernels.cpu.layout import BLOCKS, CODES, CODES_ROWS, GROUP, LANES, PREPARE, TILE, TILES
from kernels.cpu.tiles import call_variants, write_out

_BLOCK = BLOCKS["eight"]
_VARIANTS = (1, 2, 4, CODES_ROWS)
"""Rows that products are compiled for."""
_FETCHED = 16
"""Blocks that are asked of memory before they are needed: processors by themselves ask for less."""
SCALES = TILE * GROUP
"""Bytes of codes in a block, behind which its scales lie; it is the same of rows."""
LOW_BITS = 7
_LARGEST = 127 << LOW_BITS
_LEAST = 2.0**-90
"""Groups whose largest number is less count as zeros: its inverse could not be told in float32."""
_BYTES = ir.VectorType(I8, LANES)
_PRODUCT, _X, _W = 0, 4, 6
_PRODUCTS = 64
_BEHIND = 2
_SLOTS = 4
"""Products that are kept: none of them is waited for when the next is written."""


def write_prepare(module: Module) -> None:
    """`prepare` of PREPARE: codes of rows, CODES_ROWS of them side by side in each block."""
    code = Code(module, "prepare", PREPARE)
    args, build = code.args, code.build
    with code.loop(0, args["count"]) as row:
        group = build.ashr(row, I64(CODES_ROWS.bit_length() - 1))
        place = code.minus(row, code.times(group, CODES_ROWS))
        source = code.plus(args["x"], code.times(row, args["row_stride"]))
        target = code.plus(args["prepared"], code.times(code.times(group, args["blocks"]), CODES))
        with code.loop(0, args["blocks"]) as block:
            at = code.plus(target, code.times(block, CODES))
            _write_codes(code, code.plus(source, code.times(block, 2 * GROUP)), at, place)
    code.done()


def integers_of(code: Code, source: Any) -> tuple[Any, list[Any]]:
    """The scale of a row's group of columns, and what they are times: integers of 15 bits, in two vectors."""
    build = code.build
    values = [code.load_halves(source, 2 * LANES * half) for half in range(2)]
    largest = code.farthest(values)
    is_small = build.fcmp_ordered("<", largest, F32(_LEAST))
    inverse = build.select(is_small, F32(0.0), build.fdiv(F32(_LARGEST), largest))
    scale = build.fmul(largest, F32(1 / _LARGEST))
    return scale, [build.fptosi(code.rounded(build.fmul(value, code.same(inverse))), WORDS) for value in values]


def bytes_of(code: Code, numbers: Any) -> tuple[Any, Any]:
    """The high and the low part of integers of 15 bits."""
    build = code.build
    high = build.ashr(build.add(numbers, words(1 << (LOW_BITS - 1))), words(LOW_BITS))
    low = build.sub(numbers, build.shl(high, words(LOW_BITS)))
    return build.trunc(high, _BYTES), build.trunc(low, _BYTES)


def _write_codes(code: Code, source: Any, target: Any, place: Any) -> None:
    """A row's group of columns: both parts of its codes, and its scale."""
    scale, integers = integers_of(code, source)
    code.store(scale, target, code.plus(code.times(place, 4), SCALES))
    for half, numbers in enumerate(integers):
        for part, found in enumerate(bytes_of(code, numbers)):
            code.store(found, target, code.plus(code.times(place, 2 * GROUP), part * GROUP + half * LANES))


def write_tiles(module: Module, wide: bool = False) -> None:
    """`tiles_eight` of TILES for any number of rows, CODES_ROWS at a time. `wide`: results stay float32."""
    for rows in _VARIANTS:
        _write_some(Code(module, f"tiles_eight_{rows}", TILES), rows, wide)
    call_variants(Code(module, "tiles_eight", TILES), "tiles_eight", _VARIANTS, CODES // CODES_ROWS)


def _write_some(code: Code, rows: int, wide: bool) -> None:
    """As many rows as `count` says, `rows` at most. Rows that are not there are zeros."""
    args, build = code.args, code.build
    stack = code.room(_PRODUCTS + _SLOTS * 1024)
    code.clear(stack, I64(_PRODUCTS + _SLOTS * 1024))
    _configure(code, stack)
    tile_size = code.times(args["blocks"], _BLOCK)

    def slot_of(number: Any) -> Any:
        return code.plus(stack, _PRODUCTS, code.times(build.and_(number, I64(_SLOTS - 1)), 1024))

    totals = [code.variable(code.number(0.0)) for _ in range(rows)]
    with code.loop(args["first"], args["last"]) as tile:
        weights = code.plus(args["w"], code.times(tile, tile_size))
        for total in totals:
            total.set(code.number(0.0))
        with code.loop(0, code.plus(args["blocks"], _BEHIND)) as number:
            with code.when(build.icmp_signed("<", number, args["blocks"])):
                block = code.plus(weights, code.times(number, _BLOCK))
                code.fetch(code.plus(block, _FETCHED * _BLOCK), _BLOCK)
                _multiply(code, code.plus(args["prepared"], code.times(number, CODES)), block, slot_of(number))
            with code.when(build.icmp_signed(">=", number, I64(_BEHIND))):
                before = code.plus(number, -_BEHIND)
                block = code.plus(weights, code.times(before, _BLOCK))
                codes = code.plus(args["prepared"], code.times(before, CODES))
                scales, slot = code.load_vector(block, SCALES), slot_of(before)
                for row, total in enumerate(totals):
                    high, low = (code.load(WORDS, slot, 64 * (2 * row + part)) for part in range(2))
                    found = build.sitofp(build.add(build.shl(high, words(LOW_BITS)), low), VECTOR)
                    found = build.fmul(found, code.load_same(codes, SCALES + 4 * row))
                    total.set(code.fma(found, scales, total.get()))
        write_out(code, tile, totals, wide)
    code.call("llvm.x86.tilerelease", ir.VoidType())
    code.done()


def _configure(code: Code, stack: Any) -> None:
    """Two rows of products and of codes for each row that there is; eight of weights, four columns in each."""
    height = code.build.trunc(code.times(code.args["count"], 2), I8)
    code.configure_tiles(stack, [(_PRODUCT, 64, height), (_X, GROUP, height), (_W, 64, I8(GROUP // 4))])


def _multiply(code: Code, codes: Any, block: Any, slot: Any) -> None:
    nothing = ir.VoidType()
    code.call("llvm.x86.tilezero", nothing, I8(_PRODUCT))
    code.call("llvm.x86.tileloadd64", nothing, I8(_X), code.at(codes), I64(GROUP))
    code.call("llvm.x86.tileloadd64", nothing, I8(_W), code.at(block), I64(64))
    code.call("llvm.x86.tdpbssd", nothing, I8(_PRODUCT), I8(_X), I8(_W))
    code.call("llvm.x86.tilestored64", nothing, I8(_PRODUCT), code.at(slot), I64(64))
