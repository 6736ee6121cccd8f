"""Products with bfloat16 weights by tiles, and what all products of tiles share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kernels.cpu.code import I8, I64, Code, Module, Variable
from kernels.cpu.layout import BLOCKS, TILE, TILES

_BLOCK = BLOCKS["half"]
_FETCHED = 8
"""Blocks that are asked of memory before they are needed: processors by themselves ask for less."""
_ROWS = TILE
_X, _W = 4, 6
"""Tiles: 0 to 3 are totals of two tiles of weights for each of two groups of rows, then come those rows and weights."""
_PRODUCTS, _STACK = 64, 64 + 4 * 1024


def write_tiles(module: Module, name: str, wide: bool = False) -> None:
    """A function of TILES for any number of rows: 32 at a time while each pair of weights is at hand, the rest
    behind. `wide`: results stay float32."""
    for groups in (1, 2):
        code = Code(module, f"{name}_{groups}", TILES)
        _Tiles(code, groups, wide).write()
        code.call("llvm.x86.tilerelease", ir.VoidType())
        code.done()
    code = Code(module, name, TILES)
    whole = code.build.and_(code.args["count"], I64(-2 * _ROWS))
    left = code.minus(code.args["count"], whole)
    with code.when(code.build.icmp_signed(">", whole, I64(0))):
        _call(code, f"{name}_2", I64(0), whole)
    with code.when(code.between(_ROWS, left, 2 * _ROWS)):
        _call(code, f"{name}_2", whole, left)
    with code.when(code.between(0, left, _ROWS)):
        _call(code, f"{name}_1", whole, left)
    code.done()


def _call(code: Code, name: str, first: Any, count: Any) -> None:
    code.run(name, *_rows_from(code, first, count).values())


def _rows_from(code: Code, first: Any, count: Any) -> dict[str, Any]:
    """The function's arguments, for `count` rows from `first` on."""
    given = code.args | {"count": count}
    for address, stride in (("x", "row_stride"), ("y", "out_stride")):
        if address in given:
            given[address] = code.plus(given[address], code.times(first, given[stride]))
    return given


def call_variants(code: Code, name: str, variants: Sequence[int], prepared: int) -> None:
    """The body of a function of TILES or PREPARE for any number of rows: as many at a time as the last variant takes,
    by the variant of `name` for as many or some more. Of each row and block `prepared` bytes are prepared."""
    args = code.args
    with code.loop(0, args["count"], variants[-1]) as row:
        some = code.least(code.minus(args["count"], row), variants[-1])
        given = _rows_from(code, row, some)
        skipped = code.times(code.times(row, args["blocks"]), prepared)
        given["prepared"] = code.plus(args["prepared"], skipped)
        for least, most in zip((0, *variants), variants, strict=False):
            with code.when(code.between(least, some, most)):
                code.run(f"{name}_{most}", *given.values())
    code.done()


def write_out(code: Code, tile: Any, totals: Sequence[Variable], wide: bool) -> None:
    """A tile's results, one vector a row, as far as there are rows. `wide`: they stay float32."""
    args, (put, size) = code.args, (code.store, 4) if wide else (code.store_halves, 2)
    for row, total in enumerate(totals):
        with code.when(code.build.icmp_signed(">", args["count"], I64(row))):
            put(total.get(), code.plus(args["y"], code.times(args["out_stride"], row), code.times(tile, size * TILE)))


class _Tiles:
    """All rows in groups of 16, one or two at a time; the last group may have fewer."""

    def __init__(self, code: Code, groups: int, wide: bool) -> None:
        self.code, self.args, self.groups, self.wide = code, code.args, groups, wide
        self.stack = code.room(_STACK)
        self.products = code.plus(self.stack, _PRODUCTS)
        self.tile_size = code.times(code.args["blocks"], _BLOCK)

    def write(self) -> None:
        code, args = self.code, self.args
        self._configure()
        before = code.plus(args["last"], -1)
        with code.loop(args["first"], args["last"], 2) as tile:
            # Of an odd number the last is taken twice.
            tiles = tile, code.least(code.plus(tile, 1), before)
            with code.loop(0, args["count"], self.groups * _ROWS) as row:
                self._multiply(tiles, row)
                for group in range(self.groups):
                    self._write_out(tiles, row, group)

    def _configure(self) -> None:
        """Tiles of 64 bytes: as many rows of totals and rows as there are, 16 of weights."""
        code, tiles = self.code, [(tile, 64, I8(_ROWS)) for tile in (_W, _W + 1)]
        for group in range(self.groups):
            rows = code.build.trunc(self._rows(group, I64(0)), I8)
            tiles += [(tile, 64, rows) for tile in (2 * group, 2 * group + 1, _X + group)]
        code.configure_tiles(self.stack, tiles)

    def _rows(self, group: int, first: Any) -> Any:
        """Rows of a group of those from `first` on."""
        code = self.code
        return code.least(code.minus(self.args["count"], code.plus(first, group * _ROWS)), _ROWS)

    def _multiply(self, tiles: tuple[Any, Any], row: Any) -> None:
        code, args = self.code, self.args
        for total in range(2 * self.groups):
            code.call("llvm.x86.tilezero", ir.VoidType(), I8(total))
        weights = [code.plus(args["w"], code.times(tile, self.tile_size)) for tile in tiles]
        rows = code.plus(args["x"], code.times(row, args["row_stride"]))
        with code.loop(0, args["blocks"]) as number:
            at = code.times(number, _BLOCK)
            for group in range(self.groups):
                place = code.plus(rows, code.times(args["row_stride"], group * _ROWS), code.times(number, 64))
                self._load(_X + group, place, args["row_stride"])
            for place, address in enumerate(weights):
                code.fetch(code.plus(address, at, _FETCHED * _BLOCK), _BLOCK)
                self._load(_W + place, code.plus(address, at), I64(64))
                for group in range(self.groups):
                    names = (I8(number) for number in (2 * group + place, _X + group, _W + place))
                    code.call("llvm.x86.tdpbf16ps", ir.VoidType(), *names)

    def _load(self, tile: int, address: Any, stride: Any) -> None:
        self.code.call("llvm.x86.tileloadd64", ir.VoidType(), I8(tile), self.code.at(address), stride)

    def _write_out(self, tiles: tuple[Any, Any], first: Any, group: int) -> None:
        code, args = self.code, self.args
        for place in range(2):
            where = code.at(self.products, 1024 * place)
            code.call("llvm.x86.tilestored64", ir.VoidType(), I8(2 * group + place), where, I64(64))
        with code.loop(0, self._rows(group, first)) as row:
            target = code.times(code.plus(first, row, group * _ROWS), args["out_stride"])
            for place, tile in enumerate(tiles):
                value = code.load_vector(code.plus(self.products, code.times(row, 64)), 1024 * place)
                put, size = (code.store, 4) if self.wide else (code.store_halves, 2)
                put(value, code.plus(args["y"], target, code.times(tile, size * _ROWS)))
