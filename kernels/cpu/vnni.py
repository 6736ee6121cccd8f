"""Products with weights of four and eight bits by AVX-512's dot products of bytes (VNNI), without tiles.

Rows become integers of 15 bits with a scale for each group of 32 columns, as in kernels.cpu.eight_bit_tiles. Weights
stay the codes that they are, as bytes from 0 on: an instruction multiplies four of them of each of 16 weight rows with
a high or a low part of a row's, and adds them up. Sums of a group are exact, and scaled in float32, one group behind
the other, so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kernels.cpu.code import F32, I32, VECTOR, WORDS, Code, Module, words
from kernels.cpu.eight_bit_tiles import LOW_BITS, SCALES, bytes_of, integers_of
from kernels.cpu.layout import BLOCKS, DOT_CODES, GROUP, LANES, PREPARE, TILES
from kernels.cpu.tiles import call_variants, write_out

_TILES_OF = {1: 4, 2: 2, 4: 2, 8: 1, 16: 1}
"""Tiles that are taken at once, by the rows that products are compiled for."""
_FETCHED = 48
"""Blocks that are asked of memory before they are needed: processors by themselves ask for less."""
_WORD = 4
"""Codes that an instruction adds up."""
_NIBBLES = 0x0F0F0F0F
_MIDDLE = 128
"""What is added to weights of eight bits, which are signed, to make bytes from 0 on of them."""


def write_dots(module: Module, kind: str, wide: bool = False) -> None:
    """`prepare` of PREPARE and `tiles_<kind>` of TILES. `wide`: results stay float32."""
    weights = _KINDS[kind]
    for rows, tiles in _TILES_OF.items():
        _write_prepare(Code(module, f"prepare_{rows}", PREPARE), weights, rows)
        _write_some(Code(module, f"tiles_{kind}_{rows}", TILES), kind, rows, tiles, wide)
    for name, names in (("prepare", PREPARE), (f"tiles_{kind}", TILES)):
        call_variants(Code(module, name, names), name, [*_TILES_OF], DOT_CODES)


def _scales_at(rows: int) -> int:
    """Where scales lie, behind the codes of a block of so many rows; behind them lies what sums are moved by."""
    return 2 * GROUP * rows


def _write_prepare(code: Code, weights: type[_Codes], rows: int) -> None:
    """Codes, scales and sums of rows, side by side for each block. Of rows that are not there scales and sums are
    zeros: processors take long for numbers as small as what may lie there."""
    args = code.args
    with code.loop(args["count"], rows) as row, code.loop(0, args["blocks"]) as number:
        skipped = code.plus(code.times(number, DOT_CODES * rows), code.times(row, 4))
        for behind in (_scales_at(rows), _scales_at(rows) + 4 * rows):
            code.store(F32(0.0), code.plus(args["prepared"], skipped), behind)
    with code.loop(0, args["count"]) as row:
        source = code.plus(args["x"], code.times(row, args["row_stride"]))
        at_scale = code.plus(args["prepared"], code.times(row, 4), _scales_at(rows))
        target = code.plus(args["prepared"], code.times(row, 2 * GROUP))
        with code.loop(0, args["blocks"]) as number:
            skipped = code.times(number, DOT_CODES * rows)
            scale, integers = integers_of(code, code.plus(source, code.times(number, 2 * GROUP)))
            for half, numbers in enumerate(integers):
                for part, found in enumerate(bytes_of(code, numbers)):
                    found = code.build.shuffle_vector(found, found, WORDS([*weights.order]))
                    code.store(found, code.plus(target, skipped), part * GROUP + half * LANES)
            total = code.call("llvm.vector.reduce.add.v16i32", I32, code.build.add(*integers))
            code.store(scale, code.plus(at_scale, skipped))
            code.store(weights.moved_by(code, total, scale), code.plus(at_scale, skipped), 4 * rows)
    code.done()


def _write_some(code: Code, kind: str, rows: int, tiles: int, wide: bool) -> None:
    """As many rows as `count` says, `rows` at most, and some tiles at a time. Behind the last it is taken again."""
    args, size = code.args, BLOCKS[kind]
    tile_size, last = code.times(args["blocks"], size), code.plus(args["last"], -1)
    totals = [[code.variable(code.number(0.0)) for _ in range(rows)] for _ in range(tiles)]
    with code.loop(args["first"], args["last"], tiles) as first:
        taken = [code.least(code.plus(first, number), last) for number in range(tiles)]
        weights = [code.plus(args["w"], code.times(tile, tile_size)) for tile in taken]
        for total in (total for some in totals for total in some):
            total.set(code.number(0.0))
        with code.loop(0, args["blocks"]) as number:
            codes = code.plus(args["prepared"], code.times(number, DOT_CODES * rows))
            for address, some in zip(weights, totals, strict=True):
                block = code.plus(address, code.times(number, size))
                code.fetch(code.plus(block, _FETCHED * size), size)
                found = _KINDS[kind](code, block)
                for row, total in enumerate(some):
                    at_scale = code.plus(codes, _scales_at(rows) + 4 * row)
                    parts = (code.plus(codes, 2 * GROUP * row + part * GROUP) for part in range(2))
                    total.set(found.add_to(total.get(), parts, at_scale, code.plus(at_scale, 4 * rows)))
        for tile, some in zip(taken, totals, strict=True):
            write_out(code, tile, some, wide)
    code.done()


class _Codes(ABC):
    """Those of a block, as vectors of bytes: of each weight row four codes for columns side by side in `order`."""

    order: Sequence[int] = range(LANES)
    """Of 16 columns those that lie at each place."""

    def __init__(self, code: Code, block: Any) -> None:
        self.code, self.build, self.block = code, code.build, block
        self.codes = self._bytes()

    @abstractmethod
    def _bytes(self) -> list[Any]:
        """See above; scales are loaded, too."""

    @staticmethod
    @abstractmethod
    def moved_by(code: Code, total: Any, scale: Any) -> Any:
        """What a row's sums are moved by for each group, of 32 bits, from the sum of its integers."""

    @abstractmethod
    def add_to(self, total: Any, parts: Any, scale: Any, moved: Any) -> Any:
        """A row's total with this block's: addresses of both parts of its codes, of its scale, and of `moved_by`."""

    def _add(self, sums: Any, part: Any) -> Any:
        """Sums with those of a part of a row."""
        for number, codes in enumerate(self.codes):
            word = self.code.same(self.code.load(I32, part, _WORD * number))
            sums = self.code.call("llvm.x86.avx512.vpdpbusd.512", WORDS, sums, codes, word)
        return sums

    def _higher(self, sums: Any) -> Any:
        return self.build.shl(sums, words(LOW_BITS))


class _FourBits(_Codes):
    """scale * code + (middle - 8 * scale); in words of eight codes, those of odd columns in the upper half."""

    order = tuple(8 * word + column for word in range(2) for column in (0, 4, 1, 5, 2, 6, 3, 7))

    def _bytes(self) -> list[Any]:
        parts = ir.VectorType(ir.HalfType(), LANES)
        self.scale, middle = (
            self.build.fpext(self.code.load(parts, self.block, 256 + 32 * part), VECTOR) for part in range(2)
        )
        self.moved = self.code.fma(self.scale, self.code.number(-8.0), middle)
        found = []
        for word in range(GROUP // (2 * _WORD)):
            bits = self.code.load(WORDS, self.block, 64 * word)
            found += [self.build.and_(part, words(_NIBBLES)) for part in (bits, self.build.lshr(bits, words(4)))]
        return found

    @staticmethod
    def moved_by(code: Code, total: Any, scale: Any) -> Any:
        """The sum of its numbers."""
        return code.build.fmul(code.build.sitofp(total, F32), scale)

    def add_to(self, total: Any, parts: Any, scale: Any, moved: Any) -> Any:
        """See _Codes."""
        high, low = parts
        sums = self._add(self._higher(self._add(words(0), high)), low)
        found = self.build.fmul(self.build.sitofp(sums, VECTOR), self.code.load_same(scale))
        total = self.code.fma(found, self.scale, total)
        return self.code.fma(self.moved, self.code.load_same(moved), total)


class _EightBits(_Codes):
    """scale * code."""

    def _bytes(self) -> list[Any]:
        self.scale = self.code.load_vector(self.block, SCALES)
        bits = (self.code.load(WORDS, self.block, 64 * word) for word in range(GROUP // _WORD))
        return [self.build.xor(word, words(0x80808080 - (1 << 32))) for word in bits]

    @staticmethod
    def moved_by(code: Code, total: Any, scale: Any) -> Any:
        """What the sum is too large by, with another sign."""
        return code.build.mul(total, I32(-_MIDDLE))

    def add_to(self, total: Any, parts: Any, scale: Any, moved: Any) -> Any:
        """See _Codes."""
        high, low = parts
        sums = self.build.add(self._higher(self._add(words(0), high)), self.code.same(self.code.load(I32, moved)))
        found = self.build.sitofp(self._add(sums, low), VECTOR)
        return self.code.fma(self.build.fmul(found, self.code.load_same(scale)), self.scale, total)


_KINDS: dict[str, type[_Codes]] = {"four": _FourBits, "eight": _EightBits}
