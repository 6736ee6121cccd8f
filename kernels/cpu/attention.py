"""Attention of few queries on a CPU, where each lane of a vector is a query: see kernels.cpu.stack."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.cpu.code import I8, I16, I32, I64, Code, Module
from kernels.cpu.layout import ITEM_FIELDS, KEYS, LANES, LAYER_FIELDS, QUERIES_FIELDS, RUN_ARGS, TILE, StackShape

_HIDDEN = -1e30
"""Product of a key and a query that does not see it."""
_LEAST = -50.0
"""Powers of e below this exponent are 0: they change no sum, and processors are slow with products so small."""
_FETCHED = 32
"""Keys that are prefetched ahead: they lie too far from each other for processors to do it on their own."""
_AHEAD, _STAGES = 2, 4
"""Tiles of keys that are laid out before one is multiplied, and tiles that are kept, so that nothing waits."""
_SCORES, _KEYS, _QUERIES = range(3)
"""Tile registers."""


def write_attention(module: Module, shape: StackShape) -> None:
    """Write `attend`: up to 16 queries of a kv head attend by two passes over scores in a thread's own memory."""
    code = Code(module, "attend", ["run", "layer", "item", "scratch"])
    _Attention(code, shape).write()
    code.done()


class _Attention:
    def __init__(self, code: Code, shape: StackShape) -> None:
        self.code, self.shape = code, shape
        self.run, self.layer = code.fields(code.args["run"], RUN_ARGS), code.fields(code.args["layer"], LAYER_FIELDS)
        self.item = code.fields(code.args["item"], ITEM_FIELDS)
        where = code.plus(self.run["queries"], code.times(self.item["queries"], 8 * len(QUERIES_FIELDS)))
        self.queries = code.fields(where, QUERIES_FIELDS)
        scratch = code.args["scratch"]
        self.laid, self.scores = (code.plus(scratch, self.run[name]) for name in ("at_queries", "at_scores"))
        self.has_tiles, self.some = code.isa.has_tiles, code.isa.registers // 2
        self.num_keys = self.queries["num_keys"]
        self.num_lanes = code.times(self.item["count"], shape.group)
        self.first = code.plus(self.queries["first"], self.item["first"])

    def write(self) -> None:
        self._lay_out_queries()
        if self.has_tiles:
            self._score_by_tiles()
        else:
            self._score()
        self._hide()
        self._weigh()
        self._add_up()

    def _lay_out_queries(self) -> None:
        """Lay out columns in float32, each with all queries side by side; for tiles, pairs of columns as they are."""
        code, shape = self.code, self.shape
        columns = 2 if self.has_tiles else 1
        with code.loop(0, shape.head_dim // columns * 64, 64) as at:
            code.store(code.number(0.0), code.plus(self.laid, at))
        with code.loop(0, self.item["count"]) as row:
            for member in range(shape.group):
                head = code.plus(code.times(self.item["head"], shape.group), member)
                source = code.plus(code.times(code.plus(self.first, row), shape.num_qkv_heads), head)
                source = code.plus(self.run["heads"], code.times(source, 2 * shape.head_dim))
                target = code.plus(self.laid, code.times(row, 4 * shape.group), 4 * member)
                with code.loop(0, shape.head_dim // columns) as number:
                    if self.has_tiles:
                        value = code.load(I32, source, code.times(number, 4))
                    else:
                        value = code.load_half(source, code.times(number, 2))
                    code.store(value, target, code.times(number, 64))

    def _key(self, number: Any, name: str) -> Any:
        """Return the address of the key, or its value, of this number."""
        code, shape = self.code, self.shape
        slot = code.load_number(self.queries["slots"], code.times(number, 8))
        place = code.plus(code.times(slot, shape.num_kv_heads), self.item["head"])
        return code.plus(self.layer[name], code.times(place, 2 * shape.head_dim))

    def _score(self) -> None:
        """Multiply queries by some keys at a time, which are converted to float32 first. Past the last key, it is
        repeated, and its results are not used."""
        code, width, some = self.code, 4 * self.shape.head_dim, self.some
        room, last = code.room(some * width), code.plus(self.num_keys, -1)
        totals = [code.variable(code.number(0.0)) for _ in range(some)]
        with code.loop(0, self.num_keys, some) as first:
            for number, total in enumerate(totals):
                key = self._key(code.least(code.plus(first, number), last), "keys")
                for column in range(0, self.shape.head_dim, LANES):
                    code.store(code.load_halves(key, 2 * column), room, number * width + 4 * column)
                ahead = code.least(code.plus(first, number + _FETCHED), last)
                code.fetch(self._key(ahead, "keys"), width // 2)
                total.set(code.number(0.0))
            with code.loop(0, self.shape.head_dim) as column:
                queries = code.load_vector(self.laid, code.times(column, 64))
                keys = code.plus(room, code.times(column, 4))
                for number, total in enumerate(totals):
                    total.set(code.fma(queries, code.load_same(keys, number * width), total.get()))
            for number, total in enumerate(totals):
                code.store(total.get(), code.plus(self.scores, code.times(first, 64)), 64 * number)

    def _score_by_tiles(self) -> None:
        """Multiply queries by some keys at a time, which are a tile's rows once they lie side by side. Past the last
        key, it is repeated, and its results are not used."""
        code, size = self.code, 2 * self.shape.head_dim
        room = code.room(64 + _STAGES * KEYS * size)
        code.configure_tiles(room, [(tile, 64, I8(TILE)) for tile in (_SCORES, _KEYS, _QUERIES)])
        with code.loop(0, code.plus(self.num_keys, _AHEAD * KEYS), KEYS) as first:
            with code.when(code.build.icmp_signed("<", first, self.num_keys)):
                self._lay_keys(first, self._stage(room, first))
            before = code.plus(first, -_AHEAD * KEYS)
            with code.when(code.build.icmp_signed(">=", before, I64(0))):
                self._multiply(self._stage(room, before), code.plus(self.scores, code.times(before, 64)))
        code.tile("tilerelease")

    def _stage(self, room: Any, first: Any) -> Any:
        """Return the address where keys from number `first` on are laid out."""
        place = self.code.build.and_(first, I64((_STAGES - 1) * KEYS))
        return self.code.plus(room, 64, self.code.times(place, 2 * self.shape.head_dim))

    def _lay_keys(self, first: Any, stage: Any) -> None:
        code, size = self.code, 2 * self.shape.head_dim
        last = code.plus(self.num_keys, -1)
        with code.loop(0, KEYS) as number:
            key = self._key(code.least(code.plus(first, number), last), "keys")
            for part in range(0, size, 64):
                code.store(code.load_vector(key, part), stage, code.plus(code.times(number, size), part))
            code.fetch(self._key(code.least(code.plus(first, number, _FETCHED), last), "keys"), size)

    def _multiply(self, stage: Any, target: Any) -> None:
        code, size = self.code, 2 * self.shape.head_dim
        code.tile("tilezero", _SCORES)
        for part in range(size // 64):
            queries = code.plus(self.laid, 64 * TILE * part)
            for tile, at, stride in ((_KEYS, code.plus(stage, 64 * part), size), (_QUERIES, queries, 64)):
                code.tile("tileloadd64", tile, code.at(at), I64(stride))
            code.tile("tdpbf16ps", _SCORES, _KEYS, _QUERIES)
        code.tile("tilestored64", _SCORES, code.at(target), I64(64))

    def _hide(self) -> None:
        """Give keys that a mask hides a product below all others."""
        code, shape, masked = self.code, self.shape, self.queries["num_masked"]
        before = code.minus(self.num_keys, masked)
        bits = ir.VectorType(ir.IntType(1), LANES)
        with code.loop(0, masked) as key:
            seen = code.variable(I32(0))
            with code.loop(0, self.item["count"]) as row:
                place = code.plus(code.times(code.plus(self.item["first"], row), masked), key)
                sees = code.build.zext(code.load(I8, self.queries["mask"], place), I32)
                lanes = code.build.mul(sees, I32((1 << shape.group) - 1))
                shift = code.build.trunc(code.times(row, shape.group), I32)
                seen.set(code.build.or_(seen.get(), code.build.shl(lanes, shift)))
            place = code.plus(self.scores, code.times(code.plus(before, key), 64))
            visible = code.build.bitcast(code.build.trunc(seen.get(), I16), bits)
            code.store(code.build.select(visible, code.load_vector(place), code.number(_HIDDEN)), place)

    def _weigh(self) -> None:
        """Turn products into scores, and scores into weights; store the inverse of their sums where queries were."""
        code = self.code
        most, sums = code.variable(code.number(_HIDDEN)), code.variable(code.number(0.0))
        with code.loop(0, self.num_keys) as key:
            place = code.plus(self.scores, code.times(key, 64))
            score = code.build.fmul(code.load_vector(place), code.number(self.shape.scale))
            most.set(code.largest(most.get(), score))
            code.store(score, place)
        with code.loop(0, self.num_keys) as key:
            place = code.plus(self.scores, code.times(key, 64))
            below = code.build.fsub(code.load_vector(place), most.get())
            counts = code.build.fcmp_ordered(">", below, code.number(_LEAST))
            weight = code.build.select(counts, code.exp(below), code.number(0.0))
            sums.set(code.build.fadd(sums.get(), weight))
            code.store(weight, place)
        code.store(code.build.fdiv(code.number(1.0), sums.get()), self.laid)

    def _add_up(self) -> None:
        """Add up values times weights, for some queries at a time."""
        code, shape = self.code, self.shape
        columns = range(0, shape.head_dim, LANES)
        some = max(1, self.some // len(columns))
        with code.loop(0, self.num_lanes, some) as lane:
            totals = [[code.variable(code.number(0.0)) for _ in columns] for _ in range(some)]
            with code.loop(0, self.num_keys) as key:
                ahead = code.least(code.plus(key, _FETCHED), code.plus(self.num_keys, -1))
                code.fetch(self._key(ahead, "values"), 2 * shape.head_dim)
                value = self._key(key, "values")
                values = [code.load_halves(value, 2 * column) for column in columns]
                weights = code.plus(self.scores, code.times(key, 64), code.times(lane, 4))
                for member, row in enumerate(totals):
                    weight = code.load_same(weights, 4 * member)
                    for total, part in zip(row, values, strict=True):
                        total.set(code.fma(weight, part, total.get()))
            for member, row in enumerate(totals):
                query = code.plus(lane, member)
                with code.when(code.build.icmp_signed("<", query, self.num_lanes)):
                    share = code.load_same(self.laid, code.times(query, 4))
                    target = self._target(query)
                    for column, total in zip(columns, row, strict=True):
                        code.store_halves(code.build.fmul(total.get(), share), target, 2 * column)

    def _target(self, query: Any) -> Any:
        """Return the address of a query's result."""
        code, shape = self.code, self.shape
        row, member = code.build.udiv(query, I64(shape.group)), code.build.urem(query, I64(shape.group))
        head = code.plus(code.times(self.item["head"], shape.group), member)
        place = code.plus(code.times(code.plus(self.first, row), shape.num_heads), head)
        return code.plus(self.run["attended"], code.times(place, 2 * shape.head_dim))
