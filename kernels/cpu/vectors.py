"""Products without tiles: 16 weight rows lie side by side in a vector, and are multiplied by numbers of each row.

If available, AVX-512's dot products of bytes (VNNI) multiply weights of four and eight bits. Rows become integers with
a scale for each group of 32 columns: 8 bits for four-bit weights, 15 bits in two parts for eight-bit weights, as in
kernels.cpu.tiles. Weights stay codes, as unsigned bytes: an instruction multiplies four codes of each weight row by a
part of a row's integers, and adds them up. Sums of a group are exact, and are scaled in float32, group by group.

All other weights are converted to float32 in registers, and multiplied by one number of each row. Sums run over columns
in order.

So a row's result does not depend on the rows beside it. Few rows take several tiles of weights at once: while a sum
waits for its last addition, others proceed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from kernels.cpu.code import F32, I32, VECTOR, WORDS, Code, Module, Variable, words
from kernels.cpu.isa import Isa
from kernels.cpu.layout import BLOCKS, DOT_PARTS, DOT_SCALES, FLOATS, GROUP, LANES, PREPARE_ARGS, TILES_ARGS
from kernels.cpu.tiles import LOW_BITS, SCALES, bytes_of, call_variants, integers_of, scales_of, write_out

_TILES_OF_AVX2 = {1: 4, 2: 2, 4: 1}
_FETCHED = 48
"""Blocks that are prefetched before they are needed; processors on their own prefetch fewer."""
_FRACTION, _ONE = 0xF << 19, 0x3F800000
"""A code in the four highest bits of a float32's fraction, with the bits of 1.0, is 1 + code / 16, unconverted."""
_WORD = 4
"""Codes that an instruction adds up."""
_NIBBLES = 0x0F0F0F0F
_SIGN_OFFSET = 128
"""Added to eight-bit weights, which are signed, to make unsigned bytes."""


def write_products(module: Module, kind: str, wide: bool = False) -> None:
    """Write `prepare` of PREPARE_ARGS and `tiles_<kind>` of TILES_ARGS. `wide`: results stay float32."""
    weights = (_DOTS if module.isa.has_dots(kind) else _WIDENED)[kind]
    variants = _TILES_OF_AVX2 if module.isa is Isa.AVX2 else weights.tiles_of
    for rows, tiles in variants.items():
        _write_prepare(Code(module, f"prepare_{rows}", PREPARE_ARGS), weights, rows)
        _write_some(Code(module, f"tiles_{kind}_{rows}", TILES_ARGS), weights, BLOCKS[kind], rows, tiles, wide)
    for name, names in (("prepare", PREPARE_ARGS), (f"tiles_{kind}", TILES_ARGS)):
        call_variants(module, name, names, [*variants], weights.prepared)


def _write_prepare(code: Code, weights: type[_Weights], rows: int) -> None:
    """Write the preparation of rows, side by side for each block. Missing rows become zeros, since processors are slow
    with tiny numbers, which that memory may hold."""
    args, size = code.args, weights.prepared * rows
    with code.loop(args["count"], rows) as row, code.loop(0, args["blocks"]) as number:
        weights.clear(code, code.plus(args["prepared"], code.times(number, size)), row, rows)
    with code.loop(0, args["count"]) as row:
        source = code.plus(args["x"], code.times(row, args["row_stride"]))
        with code.loop(0, args["blocks"]) as number:
            target = code.plus(args["prepared"], code.times(number, size))
            weights.prepare(code, code.plus(source, code.times(number, 2 * GROUP)), target, row, rows)
    code.done()


def _write_some(code: Code, weights: type[_Weights], size: int, rows: int, tiles: int, wide: bool) -> None:
    """Write products for `count` rows, at most `rows`, with `tiles` tiles at a time; the last tile may be repeated."""
    args = code.args
    tile_size, last = code.times(args["blocks"], size), code.plus(args["last"], -1)
    totals = [[code.variable(code.number(0.0)) for _ in range(rows)] for _ in range(tiles)]
    with code.loop(args["first"], args["last"], tiles) as first:
        taken = [code.least(code.plus(first, number), last) for number in range(tiles)]
        begins = [code.plus(args["w"], code.times(tile, tile_size)) for tile in taken]
        for total in (total for some in totals for total in some):
            total.set(code.number(0.0))
        with code.loop(0, args["blocks"]) as number:
            prepared = code.plus(args["prepared"], code.times(number, weights.prepared * rows))
            weights.multiply(code, _fetched(code, begins, number, size), prepared, totals)
        for tile, some in zip(taken, totals, strict=True):
            write_out(code, tile, some, wide)
    code.done()


def _fetched(code: Code, begins: Sequence[Any], number: Any, size: int) -> Iterator[Any]:
    """Yield the address of block `number` of each tile, and prefetch a later block."""
    for begin in begins:
        block = code.plus(begin, code.times(number, size))
        code.fetch(code.plus(block, _FETCHED * size), size)
        yield block


class _Weights(ABC):
    """The weights of a block."""

    tiles_of: ClassVar[dict[int, int]]
    """Tiles that are processed at once, by the rows that products are compiled for."""
    prepared: ClassVar[int]
    """Prepared bytes of each row and block."""

    def __init__(self, code: Code, block: Any) -> None:
        self.code, self.build, self.block = code, code.build, block

    @classmethod
    @abstractmethod
    def prepare(cls, code: Code, source: Any, target: Any, row: Any, rows: int) -> None:
        """Prepare a row's block at `source`; it goes to the row's place among all `rows` at `target`."""

    @classmethod
    @abstractmethod
    def clear(cls, code: Code, target: Any, row: Any, rows: int) -> None:
        """Prepare zeros for a missing row."""

    @classmethod
    @abstractmethod
    def multiply(cls, code: Code, blocks: Iterable[Any], prepared: Any, totals: list[list[Variable]]) -> None:
        """Add products of a block of each tile and the rows to `totals`, by tile and row."""


class _Wide(_Weights):
    """Weights converted to float32, like the rows. bfloat16 weights are the upper halves of the numbers."""

    tiles_of: ClassVar = {1: 2, 2: 2, 4: 2, 8: 1, 16: 1}
    prepared = FLOATS
    columns = 2
    """Columns in a word of 32 bits."""

    @classmethod
    def prepare(cls, code: Code, source: Any, target: Any, row: Any, rows: int) -> None:
        for column in range(0, GROUP, LANES):
            values = code.load_halves(source, 2 * column)
            code.store(values, code.plus(target, code.times(row, FLOATS)), 4 * column)

    @classmethod
    def clear(cls, code: Code, target: Any, row: Any, rows: int) -> None:
        for column in range(0, GROUP, LANES):
            code.store(code.number(0.0), code.plus(target, code.times(row, FLOATS)), 4 * column)

    @classmethod
    def multiply(cls, code: Code, blocks: Iterable[Any], prepared: Any, totals: list[list[Variable]]) -> None:
        blocks = [*blocks]  # all are prefetched before anything is loaded
        weights = [cls(code, block) for block in blocks]
        with code.loop(0, GROUP // cls.columns) as word:
            of_tiles = [code.load(WORDS, tile.block, code.times(word, 64)) for tile in weights]
            columns = code.plus(prepared, code.times(word, 4 * cls.columns))
            for column in range(cls.columns):
                found = [tile.wide(bits, column) for tile, bits in zip(weights, of_tiles, strict=True)]
                for row in range(len(totals[0])):
                    number = code.load_same(columns, FLOATS * row + 4 * column)
                    for weight, some in zip(found, totals, strict=True):
                        some[row].set(code.fma(weight, number, some[row].get()))

    def wide(self, bits: Any, column: int) -> Any:
        """Return a column of these words as float32."""
        bits = self.build.and_(bits, words(-1 << 16)) if column else self.build.shl(bits, words(16))
        return self.build.bitcast(bits, VECTOR)


class _WideFour(_Wide):
    """scale * (code - 8) + middle, which is 16 * scale * (1 + code / 16) + middle - 24 * scale."""

    columns = 8

    def __init__(self, code: Code, block: Any) -> None:
        super().__init__(code, block)
        scale, middle = scales_of(code, block)
        self.offset, self.scale = code.fma(scale, code.number(-24.0), middle), code.build.fmul(scale, code.number(16.0))

    def wide(self, bits: Any, column: int) -> Any:
        """Return a column of these words as float32; even columns are in the lower half of a word."""
        shift = 19 - (4 * (column // 2) + 16 * (column % 2))
        bits = (self.build.shl if shift > 0 else self.build.lshr)(bits, words(abs(shift)))
        bits = self.build.or_(self.build.and_(bits, words(_FRACTION)), words(_ONE))
        return self.code.fma(self.build.bitcast(bits, VECTOR), self.scale, self.offset)


class _WideEight(_Wide):
    """scale * code."""

    columns = 4

    def __init__(self, code: Code, block: Any) -> None:
        super().__init__(code, block)
        self.scale = code.load_vector(block, SCALES)

    def wide(self, bits: Any, column: int) -> Any:
        bits = self.build.ashr(self.build.shl(bits, words(24 - 8 * column)), words(24))
        return self.build.fmul(self.build.sitofp(bits, VECTOR), self.scale)


class _Codes(_Weights):
    """Weights as vectors of bytes: for each weight row four codes of columns that are adjacent in `order`. A prepared
    block has the codes of all rows side by side, then their scales, then the offsets of their sums."""

    tiles_of: ClassVar = {1: 4, 2: 2, 4: 2, 8: 1, 16: 1}
    parts: ClassVar[int]
    """Bytes of a row's codes, the high part first."""
    order: ClassVar[Sequence[int]] = range(LANES)
    """Which of 16 columns lies at each place."""
    codes: Sequence[Any]

    @classmethod
    def prepare(cls, code: Code, source: Any, target: Any, row: Any, rows: int) -> None:
        scale, integers = integers_of(code, source, cls.parts)
        for half, numbers in enumerate(integers):
            for part, found in enumerate(bytes_of(code, numbers, cls.parts)):
                found = code.build.shuffle_vector(found, found, WORDS([*cls.order]))
                place = code.plus(target, code.times(row, cls.parts * GROUP))
                code.store(found, place, part * GROUP + half * LANES)
        total = code.call("llvm.vector.reduce.add.v16i32", I32, code.build.add(*integers))
        at_scale = code.plus(target, code.times(row, 4), cls.parts * GROUP * rows)
        code.store(scale, at_scale)
        code.store(cls.offset_of(code, total, scale), at_scale, 4 * rows)

    @classmethod
    def clear(cls, code: Code, target: Any, row: Any, rows: int) -> None:
        for behind in (cls.parts * GROUP * rows, cls.parts * GROUP * rows + 4 * rows):
            code.store(F32(0.0), code.plus(target, code.times(row, 4)), behind)

    @classmethod
    def multiply(cls, code: Code, blocks: Iterable[Any], prepared: Any, totals: list[list[Variable]]) -> None:
        for block, some in zip(blocks, totals, strict=True):
            found, rows = cls(code, block), len(some)
            for row, total in enumerate(some):
                at_scale = code.plus(prepared, cls.parts * GROUP * rows + 4 * row)
                sums = found.sums_of(code.plus(prepared, cls.parts * GROUP * row))
                total.set(found.add_to(total.get(), sums, at_scale, code.plus(at_scale, 4 * rows)))

    @staticmethod
    @abstractmethod
    def offset_of(code: Code, total: Any, scale: Any) -> Any:
        """Return the 32-bit offset of a row's sums for each group, from the sum of its integers."""

    @abstractmethod
    def add_to(self, total: Any, sums: Any, scale: Any, offset: Any) -> Any:
        """Add this block to a row's total; takes its sums, and the addresses of its scale and offset."""

    def sums_of(self, row: Any) -> Any:
        """Return the products of a row's codes, at address `row`, and the weights' codes, added up."""
        sums = words(0)
        for part in range(self.parts):
            sums = self.build.shl(sums, words(LOW_BITS)) if part else sums
            for number, codes in enumerate(self.codes):
                word = self.code.same(self.code.load(I32, row, part * GROUP + _WORD * number))
                sums = self.code.call("llvm.x86.avx512.vpdpbusd.512", WORDS, sums, codes, word)
        return sums


class _FourCodes(_Codes):
    """scale * code + (middle - 8 * scale); words have eight codes, those of odd columns in the upper half."""

    parts = DOT_PARTS["four"]
    prepared = parts * GROUP + DOT_SCALES
    order: ClassVar = tuple(8 * word + column for word in range(2) for column in (0, 4, 1, 5, 2, 6, 3, 7))

    def __init__(self, code: Code, block: Any) -> None:
        super().__init__(code, block)
        self.scale, middle = scales_of(code, block)
        self.offset = code.fma(self.scale, code.number(-8.0), middle)
        self.codes = []
        for word in range(GROUP // (2 * _WORD)):
            bits = code.load(WORDS, block, 64 * word)
            self.codes += [self.build.and_(part, words(_NIBBLES)) for part in (bits, self.build.lshr(bits, words(4)))]

    @staticmethod
    def offset_of(code: Code, total: Any, scale: Any) -> Any:
        """Return the sum of the row's numbers."""
        return code.build.fmul(code.build.sitofp(total, F32), scale)

    def add_to(self, total: Any, sums: Any, scale: Any, offset: Any) -> Any:
        found = self.build.fmul(self.build.sitofp(sums, VECTOR), self.code.load_same(scale))
        total = self.code.fma(found, self.scale, total)
        return self.code.fma(self.offset, self.code.load_same(offset), total)


class _EightCodes(_Codes):
    """scale * code."""

    parts = DOT_PARTS["eight"]
    prepared = parts * GROUP + DOT_SCALES

    def __init__(self, code: Code, block: Any) -> None:
        super().__init__(code, block)
        self.scale = code.load_vector(block, SCALES)
        bits = (code.load(WORDS, block, 64 * word) for word in range(GROUP // _WORD))
        self.codes = [self.build.xor(word, words(0x80808080 - (1 << 32))) for word in bits]

    @staticmethod
    def offset_of(code: Code, total: Any, scale: Any) -> Any:
        """Return the negated excess of the sum that _SIGN_OFFSET causes."""
        return code.build.mul(total, I32(-_SIGN_OFFSET))

    def add_to(self, total: Any, sums: Any, scale: Any, offset: Any) -> Any:
        sums = self.build.add(sums, self.code.same(self.code.load(I32, offset)))
        found = self.build.fmul(self.build.sitofp(sums, VECTOR), self.code.load_same(scale))
        return self.code.fma(found, self.scale, total)


_DOTS: dict[str, type[_Weights]] = {"four": _FourCodes, "eight": _EightCodes}
_WIDENED: dict[str, type[_Weights]] = {"four": _WideFour, "eight": _WideEight, "half": _Wide}
