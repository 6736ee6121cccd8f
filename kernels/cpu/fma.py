"""Products of any number of rows without tiles: weights are made float32 in registers, 16 weight rows side by side, and
multiplied with one number of each row.

Sums run over columns in their order alone, so that a row's result does not depend on the rows beside it. Few rows take
several tiles of weights at once: a sum waits for its last addition, and others go on meanwhile.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.cpu.code import VECTOR, WORDS, Code, Module, words
from kernels.cpu.isa import Isa
from kernels.cpu.layout import BLOCKS, FLOATS, GROUP, LANES, PREPARE, TILE, TILES
from kernels.cpu.tiles import call_variants, write_out

_TILES_OF = {1: 2, 2: 2, 4: 2, 8: 1, 16: 1}
"""Tiles that are taken at once, by the rows that products are compiled for."""
_TILES_OF_AVX2 = {1: 4, 2: 2, 4: 1}
_FETCHED = 48
"""Blocks that are asked of memory before they are needed: processors by themselves ask for less."""
_FRACTION, _ONE = 0xF << 19, 0x3F800000
"""A code in the four highest bits of a float32's fraction, and the bits of 1.0: 1 + code / 16, without a conversion."""


def write_products(module: Module, kind: str, wide: bool = False) -> None:
    """`prepare` of PREPARE and `tiles_<kind>` of TILES. `wide`: results stay float32."""
    variants = _TILES_OF_AVX2 if module.isa is Isa.AVX2 else _TILES_OF
    for rows, tiles in variants.items():
        _write_prepare(Code(module, f"prepare_{rows}", PREPARE), rows)
        _write_some(Code(module, f"tiles_{kind}_{rows}", TILES), kind, rows, tiles, wide)
    for name, names in (("prepare", PREPARE), (f"tiles_{kind}", TILES)):
        call_variants(Code(module, name, names), name, [*variants], FLOATS)


def _write_prepare(code: Code, rows: int) -> None:
    """Rows as float32, those of a block one behind the other. Rows that are not there are zeros: processors take long
    for numbers as small as what may lie there."""
    args = code.args
    with code.loop(args["count"], rows) as row, code.loop(0, args["blocks"]) as number:
        target = code.plus(args["prepared"], code.times(number, rows * FLOATS), code.times(row, FLOATS))
        for column in range(0, GROUP, LANES):
            code.store(code.number(0.0), target, 4 * column)
    with code.loop(0, args["count"]) as row:
        source = code.plus(args["x"], code.times(row, args["row_stride"]))
        target = code.plus(args["prepared"], code.times(row, FLOATS))
        with code.loop(0, args["blocks"]) as number:
            for column in range(0, GROUP, LANES):
                values = code.load_halves(code.plus(source, code.times(number, 2 * GROUP)), 2 * column)
                code.store(values, code.plus(target, code.times(number, rows * FLOATS)), 4 * column)
    code.done()


def _write_some(code: Code, kind: str, rows: int, tiles: int, wide: bool) -> None:
    """As many rows as `count` says, `rows` at most, and some tiles at a time. Behind the last it is taken again."""
    args = code.args
    tile_size, last = code.times(args["blocks"], BLOCKS[kind]), code.plus(args["last"], -1)
    totals = [[code.variable(code.number(0.0)) for _ in range(rows)] for _ in range(tiles)]
    with code.loop(args["first"], args["last"], tiles) as first:
        taken = [code.least(code.plus(first, number), last) for number in range(tiles)]
        weights = [code.plus(args["w"], code.times(tile, tile_size)) for tile in taken]
        for total in (total for some in totals for total in some):
            total.set(code.number(0.0))
        with code.loop(0, args["blocks"]) as number:
            blocks = [code.plus(address, code.times(number, BLOCKS[kind])) for address in weights]
            for block in blocks:
                code.fetch(code.plus(block, _FETCHED * BLOCKS[kind]), BLOCKS[kind])
            _multiply(
                code, _WIDENED[kind], blocks, code.plus(args["prepared"], code.times(number, rows * FLOATS)), totals
            )
        for tile, some in zip(taken, totals, strict=True):
            write_out(code, tile, some, wide)
    code.done()


def _multiply(code: Code, kind: type[_Weights], blocks: list[Any], rows: Any, totals: list[list[Any]]) -> None:
    """A block of each tile times the rows."""
    weights = [kind(code, block) for block in blocks]
    with code.loop(0, GROUP // kind.columns) as word:
        of_tiles = [code.load(WORDS, block, code.times(word, 64)) for block in blocks]
        columns = code.plus(rows, code.times(word, 4 * kind.columns))
        for column in range(kind.columns):
            found = [tile.wide(bits, column) for tile, bits in zip(weights, of_tiles, strict=True)]
            for row in range(len(totals[0])):
                number = code.load_same(columns, FLOATS * row + 4 * column)
                for weight, some in zip(found, totals, strict=True):
                    some[row].set(code.fma(weight, number, some[row].get()))


class _Weights:
    """Those of a block: `columns` of them lie in a word of 32 bits."""

    columns = 2

    def __init__(self, code: Code, block: Any) -> None:
        self.code, self.build = code, code.build

    def wide(self, bits: Any, column: int) -> Any:
        """A column of these words as float32: of bfloat16, the upper half is there."""
        bits = self.build.and_(bits, words(-1 << 16)) if column else self.build.shl(bits, words(16))
        return self.build.bitcast(bits, VECTOR)


class _Four(_Weights):
    """scale * (code - 8) + middle, which is 16 * scale * (1 + code / 16) + middle - 24 * scale."""

    columns = 8

    def __init__(self, code: Code, block: Any) -> None:
        super().__init__(code, block)
        parts = ir.VectorType(ir.HalfType(), LANES)
        scale, middle = (self.build.fpext(code.load(parts, block, 256 + 32 * part), VECTOR) for part in range(2))
        self.moved, self.scale = code.fma(scale, code.number(-24.0), middle), code.build.fmul(scale, code.number(16.0))

    def wide(self, bits: Any, column: int) -> Any:
        """Columns with even numbers are in the lower half of a word."""
        shift = 19 - (4 * (column // 2) + 16 * (column % 2))
        bits = (self.build.shl if shift > 0 else self.build.lshr)(bits, words(abs(shift)))
        bits = self.build.or_(self.build.and_(bits, words(_FRACTION)), words(_ONE))
        return self.code.fma(self.build.bitcast(bits, VECTOR), self.scale, self.moved)


class _Eight(_Weights):
    """scale * code."""

    columns = 4

    def __init__(self, code: Code, block: Any) -> None:
        super().__init__(code, block)
        self.scale = code.load_vector(block, TILE * GROUP)

    def wide(self, bits: Any, column: int) -> Any:
        bits = self.build.ashr(self.build.shl(bits, words(24 - 8 * column)), words(24))
        return self.build.fmul(self.build.sitofp(bits, VECTOR), self.scale)


_WIDENED: dict[str, type[_Weights]] = {"four": _Four, "eight": _Eight, "half": _Weights}
