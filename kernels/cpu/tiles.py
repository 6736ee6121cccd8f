"""Products by tile instructions (AMX), and code that they share with kernels.cpu.vectors.

Weights of four bits become bfloat16 integers by a table in a register, two of them with a shift and a permutation; each
group's sums are scaled in float32.

With weights of eight bits, rows become integers, too: 15 bits, with a scale for each group of 32 columns, split into a
high and a low part of eight bits, which are two rows of a tile. So sums of a group are exact, and the loss is less than
that of bfloat16 in the row itself. Each group's sums are scaled in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kernels.cpu.code import F32, I8, I16, I64, VECTOR, WORDS, Code, Module, Variable, words
from kernels.cpu.layout import (
    AHEAD,
    BLOCKS,
    CODES,
    CODES_ROWS,
    GROUP,
    LANES,
    LARGEST_CODE,
    PREPARE_ARGS,
    TILE,
    TILES_ARGS,
    float_bits,
)

_ROWS = TILE
_PRODUCT_BYTES = 64 * _ROWS
"""Bytes of a tile of products or weights."""
_SLOTS = 4
"""Products, and converted blocks of weights, that are kept, so that writing the next waits for none of them."""
_PRODUCT, _X, _W = range(3)
"""Tile registers where codes are multiplied: products, rows and weights."""


def write_tiles(module: Module, kind: str, wide: bool = False) -> None:
    """Write `tiles_<kind>` of TILES_ARGS and `prepare` of PREPARE_ARGS, for any number of rows. `wide`: results stay
    float32, except for "four"."""
    {"four": _write_four, "eight": _write_eight, "half": _write_half}[kind](module, wide)


def _rows_from(code: Code, first: Any, count: Any) -> dict[str, Any]:
    """Return the function's arguments, for `count` rows from `first` on."""
    given = code.args | {"count": count}
    for address, stride in (("x", "row_stride"), ("y", "out_stride")):
        if address in given:
            given[address] = code.plus(given[address], code.times(first, given[stride]))
    return given


def call_variants(module: Module, name: str, names: Sequence[str], variants: Sequence[int], prepared: int) -> None:
    """Write a function of TILES_ARGS or PREPARE_ARGS for any number of rows: it passes as many at a time as the last
    variant takes to the smallest variant of `name` that takes them. `prepared`: prepared bytes of a row and block."""
    code = Code(module, name, names)
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
    """Store a tile's results, one vector a row, for rows that exist. `wide`: results stay float32."""
    args, (put, size) = code.args, (code.store, 4) if wide else (code.store_halves, 2)
    for row, total in enumerate(totals):
        with code.when(code.build.icmp_signed(">", args["count"], I64(row))):
            put(total.get(), code.plus(args["y"], code.times(args["out_stride"], row), code.times(tile, size * TILE)))


def _slot(code: Code, memory: Any, number: Any) -> Any:
    """Return the address where a block's product, or its converted weights, are kept."""
    return code.plus(memory, code.times(code.build.and_(number, I64(_SLOTS - 1)), _PRODUCT_BYTES))


def _multiply(code: Code, instruction: str, rows: Any, stride: Any, weights: Any, product: Any) -> None:
    """Multiply rows and weights of a block, and store the product; all are addresses."""
    code.tile("tileloadd64", _W, code.at(weights), I64(64))
    code.tile("tilezero", _PRODUCT)
    code.tile("tileloadd64", _X, code.at(rows), stride)
    code.tile(instruction, _PRODUCT, _X, _W)
    code.tile("tilestored64", _PRODUCT, code.at(product), I64(64))


# Weights of four bits. A step of the loop is a block, continuing from one tile of weights to the next. So that no
# instruction waits for the result of the one before it, step i converts block i + 2, multiplies block i and adds up
# block i - 2, whose product lies where that of i + 2 will.
_FOUR_VARIANTS = (1, 4, 8, _ROWS)
"""Rows that products are compiled for."""
_FOUR = BLOCKS["four"]
_FOUR_FETCHED = 32
"""Blocks that are prefetched before they are converted; processors on their own prefetch fewer."""
_PAIRS = ir.VectorType(I16, 2 * LANES)


def _write_four(module: Module, wide: bool) -> None:
    for rows in _FOUR_VARIANTS:
        _write_sums(Code(module, f"prepare_{rows}", PREPARE_ARGS), rows)
        _write_four_rows(Code(module, f"tiles_four_{rows}", TILES_ARGS), rows)
    for name, names in (("tiles_four", TILES_ARGS), ("prepare", PREPARE_ARGS)):
        call_variants(module, name, names, _FOUR_VARIANTS, 4)


def _configure(code: Code) -> None:
    """Configure tiles of 64-byte rows: as many rows for products and rows as there are, 16 for weights."""
    height = code.build.trunc(code.args["count"], I8)
    code.configure_tiles(code.room(64), [(_PRODUCT, 64, height), (_X, 64, height), (_W, 64, I8(TILE))])


def _write_sums(code: Code, rows: int) -> None:
    """Write sums of each row's groups, which are multiplied by middles: products with ones, 16 for each block."""
    args = code.args
    _configure(code)
    ones, product = code.room(_PRODUCT_BYTES), code.room(_PRODUCT_BYTES)
    code.clear(product, I64(_PRODUCT_BYTES))
    for row in range(TILE):
        code.store(_PAIRS([float_bits(1.0) >> 16] * 2 * LANES), ones, 64 * row)
    with code.loop(0, args["blocks"]) as number:
        skipped = code.times(number, 64)
        _multiply(code, "tdpbf16ps", code.plus(args["x"], skipped), args["row_stride"], ones, product)
        for row in range(rows):
            code.store(code.load(F32, product, 64 * row), code.plus(args["prepared"], skipped), 4 * row)
    code.tile("tilerelease")
    code.done()


def _write_four_rows(code: Code, rows: int) -> None:
    """Write products for `count` rows, at most `rows`. Missing rows are zeros, since processors are slow with tiny
    numbers, which that memory may hold."""
    args, build = code.args, code.build
    wide, products = code.room(_SLOTS * _PRODUCT_BYTES), code.room(_SLOTS * _PRODUCT_BYTES)
    code.clear(products, I64(_SLOTS * _PRODUCT_BYTES))
    _configure(code)
    weights = code.plus(args["w"], code.times(code.times(args["blocks"], _FOUR), args["first"]))
    for number in range(AHEAD):
        _widen(code, code.plus(weights, number * _FOUR), code.plus(wide, number * _PRODUCT_BYTES))
    # The first steps add up zeros, for a tile before the first.
    tile, left = code.variable(code.plus(args["first"], -1)), code.variable(I64(AHEAD))
    # Blocks of columns: of this step, of the step before, and of the one before that, whose product is added up.
    multiplied, before, added = (code.variable(I64(0)) for _ in range(3))
    totals = [code.variable(code.number(0.0)) for _ in range(rows)]
    num_blocks = code.times(code.minus(args["last"], args["first"]), args["blocks"])
    with code.loop(0, code.plus(num_blocks, AHEAD)) as step:
        block, ahead = code.plus(weights, code.times(step, _FOUR)), code.plus(step, AHEAD)
        code.fetch(code.plus(block, (AHEAD + _FOUR_FETCHED) * _FOUR), _FOUR)
        _widen(code, code.plus(block, AHEAD * _FOUR), _slot(code, wide, ahead))
        row_block = code.plus(args["x"], code.times(multiplied.get(), 64))
        places = _slot(code, wide, step), _slot(code, products, step)
        _multiply(code, "tdpbf16ps", row_block, args["row_stride"], *places)
        sums = code.plus(args["prepared"], code.times(added.get(), 64))
        _add_up(code, code.plus(block, -AHEAD * _FOUR), _slot(code, products, ahead), sums, totals)
        following = code.plus(multiplied.get(), 1)
        is_last = build.icmp_signed("==", following, args["blocks"])
        added.set(before.get())
        before.set(multiplied.get())
        multiplied.set(build.select(is_last, I64(0), following))
        left.set(code.plus(left.get(), -1))
        with code.when(build.icmp_signed("==", left.get(), I64(0))):
            with code.when(build.icmp_signed(">=", tile.get(), args["first"])):
                write_out(code, tile.get(), totals, wide=False)
            tile.set(code.plus(tile.get(), 1))
            left.set(args["blocks"])
            for total in totals:
                total.set(code.number(0.0))
    code.tile("tilerelease")
    code.done()


def _widen(code: Code, block: Any, target: Any) -> None:
    """Convert a block's codes, less 8, to bfloat16. Permutations use five bits of an index, so the table is doubled."""
    table = _PAIRS([float_bits(number - 8.0) >> 16 for number in range(16)] * 2)
    for word in range(4):
        codes = code.load(_PAIRS, block, 64 * word)
        for place in range(4):
            index = code.build.lshr(codes, _PAIRS([4 * place] * 2 * LANES)) if place else codes
            found = code.call("llvm.x86.avx512.permvar.hi.512", _PAIRS, table, index)
            code.store(found, target, 64 * (4 * word + place))


def _add_up(code: Code, block: Any, product: Any, sums: Any, totals: list[Variable]) -> None:
    """Add scale * product + middle * sum of the row's group to each row's total."""
    scale, middle = scales_of(code, block)
    for row, total in enumerate(totals):
        moved = code.fma(middle, code.load_same(sums, 4 * row), total.get())
        total.set(code.fma(scale, code.load_vector(product, 64 * row), moved))


def scales_of(code: Code, block: Any) -> tuple[Any, Any]:
    """Load scales and middles of a block of four-bit weights, which lie in float16 after its codes."""
    kind = ir.VectorType(ir.HalfType(), LANES)
    scale, middle = (code.build.fpext(code.load(kind, block, 256 + 32 * part), VECTOR) for part in range(2))
    return scale, middle


_EIGHT_VARIANTS = (1, 2, 4, CODES_ROWS)
_EIGHT = BLOCKS["eight"]
_EIGHT_FETCHED = 16
SCALES = TILE * GROUP
"""Bytes of codes in a block; its scales come after them. The same for rows."""
LOW_BITS = 7
_LEAST = 2.0**-90
"""Groups whose largest number is below this count as zeros: its inverse would not fit in float32."""
_BYTES = ir.VectorType(I8, LANES)
_BEHIND = 2
"""Blocks that are multiplied before one is added up."""


def _write_eight(module: Module, wide: bool) -> None:
    _write_codes(Code(module, "prepare", PREPARE_ARGS))
    for rows in _EIGHT_VARIANTS:
        _write_eight_rows(Code(module, f"tiles_eight_{rows}", TILES_ARGS), rows, wide)
    call_variants(module, "tiles_eight", TILES_ARGS, _EIGHT_VARIANTS, CODES // CODES_ROWS)


def _write_codes(code: Code) -> None:
    """Write codes and scales of rows, CODES_ROWS of them side by side in each block."""
    args, build = code.args, code.build
    with code.loop(0, args["count"]) as row:
        group = build.ashr(row, I64(CODES_ROWS.bit_length() - 1))
        place = code.minus(row, code.times(group, CODES_ROWS))
        source = code.plus(args["x"], code.times(row, args["row_stride"]))
        target = code.plus(args["prepared"], code.times(code.times(group, args["blocks"]), CODES))
        with code.loop(0, args["blocks"]) as block:
            at = code.plus(target, code.times(block, CODES))
            scale, integers = integers_of(code, code.plus(source, code.times(block, 2 * GROUP)), 2)
            code.store(scale, at, code.plus(code.times(place, 4), SCALES))
            for half, numbers in enumerate(integers):
                for part, found in enumerate(bytes_of(code, numbers, 2)):
                    code.store(found, at, code.plus(code.times(place, 2 * GROUP), part * GROUP + half * LANES))
    code.done()


def integers_of(code: Code, source: Any, parts: int) -> tuple[Any, list[Any]]:
    """Return the scale of a row's group of columns, and the group over it: 8-bit or 15-bit integers, in two vectors.

    `parts`: the bytes of an integer, 1 or 2.
    """
    build, limit = code.build, LARGEST_CODE << LOW_BITS * (parts - 1)
    values = [code.load_halves(source, 2 * LANES * half) for half in range(2)]
    largest = code.farthest(values)
    is_small = build.fcmp_ordered("<", largest, F32(_LEAST))
    inverse = build.select(is_small, F32(0.0), build.fdiv(F32(limit), largest))
    scale = build.fmul(largest, F32(1 / limit))
    return scale, [build.fptosi(code.rounded(build.fmul(value, code.same(inverse))), WORDS) for value in values]


def bytes_of(code: Code, numbers: Any, parts: int) -> Sequence[Any]:
    """Return integers of 8 bits, or the high and the low part of integers of 15 bits."""
    build = code.build
    if parts == 1:
        return [build.trunc(numbers, _BYTES)]
    high = build.ashr(build.add(numbers, words(1 << (LOW_BITS - 1))), words(LOW_BITS))
    low = build.sub(numbers, build.shl(high, words(LOW_BITS)))
    return [build.trunc(high, _BYTES), build.trunc(low, _BYTES)]


def _write_eight_rows(code: Code, rows: int, wide: bool) -> None:
    """Write products for `count` rows, at most `rows`. Missing rows are zeros."""
    args, build = code.args, code.build
    products = code.room(_SLOTS * _PRODUCT_BYTES)
    code.clear(products, I64(_SLOTS * _PRODUCT_BYTES))
    # Two rows of products and of codes for each row; eight of weights, four columns in each.
    height = build.trunc(code.times(args["count"], 2), I8)
    code.configure_tiles(code.room(64), [(_PRODUCT, 64, height), (_X, GROUP, height), (_W, 64, I8(GROUP // 4))])
    tile_size = code.times(args["blocks"], _EIGHT)
    totals = [code.variable(code.number(0.0)) for _ in range(rows)]
    with code.loop(args["first"], args["last"]) as tile:
        weights = code.plus(args["w"], code.times(tile, tile_size))
        for total in totals:
            total.set(code.number(0.0))
        with code.loop(0, code.plus(args["blocks"], _BEHIND)) as number:
            with code.when(build.icmp_signed("<", number, args["blocks"])):
                block = code.plus(weights, code.times(number, _EIGHT))
                code.fetch(code.plus(block, _EIGHT_FETCHED * _EIGHT), _EIGHT)
                codes = code.plus(args["prepared"], code.times(number, CODES))
                _multiply(code, "tdpbssd", codes, I64(GROUP), block, _slot(code, products, number))
            with code.when(build.icmp_signed(">=", number, I64(_BEHIND))):
                before = code.plus(number, -_BEHIND)
                block = code.plus(weights, code.times(before, _EIGHT))
                codes = code.plus(args["prepared"], code.times(before, CODES))
                scales, product = code.load_vector(block, SCALES), _slot(code, products, before)
                for row, total in enumerate(totals):
                    high, low = (code.load(WORDS, product, 64 * (2 * row + part)) for part in range(2))
                    found = build.sitofp(build.add(build.shl(high, words(LOW_BITS)), low), VECTOR)
                    found = build.fmul(found, code.load_same(codes, SCALES + 4 * row))
                    total.set(code.fma(found, scales, total.get()))
        write_out(code, tile, totals, wide)
    code.tile("tilerelease")
    code.done()


_HALF = BLOCKS["half"]
_HALF_FETCHED = 8
_HALF_X, _HALF_W = 4, 6
"""Tile registers: 0 to 3 are totals of two tiles of weights for each of two groups of rows, then rows and weights."""


def _write_half(module: Module, wide: bool) -> None:
    """Write products of 32 rows at a time with each pair of weight tiles, and then of the rest. Nothing is prepared."""
    Code(module, "prepare", PREPARE_ARGS).done()
    for groups in (1, 2):
        code = Code(module, f"tiles_half_{groups}", TILES_ARGS)
        _Half(code, groups, wide).write()
        code.tile("tilerelease")
        code.done()
    code = Code(module, "tiles_half", TILES_ARGS)
    whole = code.build.and_(code.args["count"], I64(-2 * _ROWS))
    left = code.minus(code.args["count"], whole)
    with code.when(code.build.icmp_signed(">", whole, I64(0))):
        code.run("tiles_half_2", *_rows_from(code, I64(0), whole).values())
    with code.when(code.between(_ROWS, left, 2 * _ROWS)):
        code.run("tiles_half_2", *_rows_from(code, whole, left).values())
    with code.when(code.between(0, left, _ROWS)):
        code.run("tiles_half_1", *_rows_from(code, whole, left).values())
    code.done()


class _Half:
    """Products of all rows in groups of 16, one or two at a time; the last group may have fewer rows."""

    def __init__(self, code: Code, groups: int, wide: bool) -> None:
        self.code, self.args, self.groups, self.wide = code, code.args, groups, wide
        self.stack = code.room(64 + 2 * _PRODUCT_BYTES)
        self.products = code.plus(self.stack, 64)
        self.tile_size = code.times(code.args["blocks"], _HALF)

    def write(self) -> None:
        code, args = self.code, self.args
        self._configure()
        before = code.plus(args["last"], -1)
        with code.loop(args["first"], args["last"], 2) as tile:
            # If their number is odd, the last tile is processed twice.
            tiles = tile, code.least(code.plus(tile, 1), before)
            with code.loop(0, args["count"], self.groups * _ROWS) as row:
                self._multiply(tiles, row)
                for group in range(self.groups):
                    self._write_out(tiles, row, group)

    def _configure(self) -> None:
        """Configure tiles of 64-byte rows: as many rows for totals and rows as there are, 16 for weights."""
        code, tiles = self.code, [(tile, 64, I8(_ROWS)) for tile in (_HALF_W, _HALF_W + 1)]
        for group in range(self.groups):
            rows = code.build.trunc(self._rows(group, I64(0)), I8)
            tiles += [(tile, 64, rows) for tile in (2 * group, 2 * group + 1, _HALF_X + group)]
        code.configure_tiles(self.stack, tiles)

    def _rows(self, group: int, first: Any) -> Any:
        """Return the number of rows in a group, counted from row `first` on."""
        code = self.code
        return code.least(code.minus(self.args["count"], code.plus(first, group * _ROWS)), _ROWS)

    def _multiply(self, tiles: tuple[Any, Any], row: Any) -> None:
        code, args = self.code, self.args
        for total in range(2 * self.groups):
            code.tile("tilezero", total)
        weights = [code.plus(args["w"], code.times(tile, self.tile_size)) for tile in tiles]
        rows = code.plus(args["x"], code.times(row, args["row_stride"]))
        with code.loop(0, args["blocks"]) as number:
            at = code.times(number, _HALF)
            for group in range(self.groups):
                place = code.plus(rows, code.times(args["row_stride"], group * _ROWS), code.times(number, 64))
                code.tile("tileloadd64", _HALF_X + group, code.at(place), args["row_stride"])
            for place, address in enumerate(weights):
                code.fetch(code.plus(address, at, _HALF_FETCHED * _HALF), _HALF)
                code.tile("tileloadd64", _HALF_W + place, code.at(code.plus(address, at)), I64(64))
                for group in range(self.groups):
                    code.tile("tdpbf16ps", 2 * group + place, _HALF_X + group, _HALF_W + place)

    def _write_out(self, tiles: tuple[Any, Any], first: Any, group: int) -> None:
        code, args = self.code, self.args
        for place in range(2):
            code.tile("tilestored64", 2 * group + place, code.at(self.products, _PRODUCT_BYTES * place), I64(64))
        with code.loop(0, self._rows(group, first)) as row:
            target = code.times(code.plus(first, row, group * _ROWS), args["out_stride"])
            for place, tile in enumerate(tiles):
                value = code.load_vector(code.plus(self.products, code.times(row, 64)), _PRODUCT_BYTES * place)
                put, size = (code.store, 4) if self.wide else (code.store_halves, 2)
                put(value, code.plus(args["y"], target, code.times(tile, size * _ROWS)))
