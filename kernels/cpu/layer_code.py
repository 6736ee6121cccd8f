"""Code of kernels.cpu.stack and kernels.cpu.head_step: a layer's phases, one after the other, as one of the threads
goes through them, and what a step of a draft head does before and after its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.cpu.attention import write_attention
from kernels.cpu.code import F32, I64, Code, Module
from kernels.cpu.isa import Isa
from kernels.cpu.layout import (
    BLOCKS,
    COUNTERS,
    GROUP,
    HEAD_ARGS,
    ITEM_FIELDS,
    LANES,
    LAYER_FIELDS,
    PHASES,
    RUN_ARGS,
    TILE,
    StackShape,
    chunk_of,
    float_bits,
)  # fmt: skip
from kernels.cpu.pool import write_call
from kernels.cpu.row_code import NORM_ARGS, norm_row, write_norm

_FETCHED = 8 << 10
"""Bytes of weights that are prefetched before a phase begins."""
_TILE_BYTES = 2 * TILE
"""Bytes of a row's results in a tile."""


def layers_module(isa: Isa, shape: StackShape, threads: int) -> Module:
    """Return a module with the function `run` of RUN_ARGS, and all functions that it calls except products."""
    module = Module(isa)
    write_norm(Code(module, "norm", NORM_ARGS))
    _write_turn(module, shape)
    write_attention(module, shape)
    _Layer(module, shape, threads).write()
    if shape.qkv_input_size:
        _write_ends(module, shape)
    _write_part(module, shape)
    write_call(module, "run", RUN_ARGS, "all_layers")
    return module


def _write_part(module: Module, shape: StackShape) -> None:
    """Write `all_layers`: all layers in one of the threads, and what a step of a draft head does before and after."""
    code = Code(module, "all_layers", ["run", "me"])
    run, me = code.fields(code.args["run"], RUN_ARGS), code.args["me"]
    scratch = code.plus(run["scratch"], code.times(me, run["scratch_size"]))
    at_ends = code.plus(run["counters"], code.times(run["num_layers"], PHASES * COUNTERS))
    is_draft = code.build.icmp_signed("!=", run["draft_head"], I64(0))
    if shape.qkv_input_size:
        with code.when(is_draft):
            code.run("begin_draft", code.args["run"], run["draft_head"], at_ends)
    with code.loop(0, run["num_layers"]) as number:
        layer = code.plus(run["layers"], code.times(number, 8 * len(LAYER_FIELDS)))
        counters = code.plus(run["counters"], code.times(number, PHASES * COUNTERS))
        code.run("layer", code.args["run"], layer, counters, scratch, me)
    if shape.qkv_input_size:
        with code.when(is_draft):
            code.run("end_draft", code.args["run"], run["draft_head"], at_ends, scratch)
    code.done()


def _write_turn(module: Module, shape: StackShape) -> None:
    """Write `turn`: bias, norm and rotation of a head in place for all rows; heads of k and v then go to the cache."""
    code = Code(module, "turn", ["run", "layer", "head"])
    run, layer, head = (
        code.fields(code.args["run"], RUN_ARGS),
        code.fields(code.args["layer"], LAYER_FIELDS),
        code.args["head"],
    )
    size, num_turned = shape.head_dim, shape.num_heads + shape.num_kv_heads
    is_turned = code.build.icmp_signed("<", head, I64(num_turned))
    with code.loop(0, run["rows"]) as row:
        place = code.plus(run["heads"], code.times(code.plus(code.times(row, shape.num_qkv_heads), head), 2 * size))
        if shape.has_bias:
            bias = code.plus(layer["qkv_bias"], code.times(head, 4 * size))
            for column in range(0, size, LANES):
                total = code.build.fadd(code.load_halves(place, 2 * column), code.load_vector(bias, 4 * column))
                code.store_halves(total, place, 2 * column)
        with code.when(is_turned):
            if shape.has_qk_norm:
                weight = code.plus(layer["qk_norm"], code.times(head, 4 * size))
                norm_row(code, place, place, weight, I64(size), F32(shape.eps))
            angles = code.times(code.load_number(run["positions"], code.times(row, 8)), 2 * size)
            _rotate(code, place, size, *(code.plus(run[name], angles) for name in ("cos", "sin")))
        slot = code.load_number(run["slots"], code.times(row, 8))
        for name, before in (("keys", shape.num_heads), ("values", num_turned)):
            kv_head = code.plus(head, -before)
            with code.when(code.between(-1, kv_head, shape.num_kv_heads - 1)):
                target = code.times(code.plus(code.times(slot, shape.num_kv_heads), kv_head), 2 * size)
                for column in range(0, size, LANES):
                    code.store_halves(code.load_halves(place, 2 * column), code.plus(layer[name], target), 2 * column)
    code.done()


def _rotate(code: Code, place: Any, size: int, cos: Any, sin: Any) -> None:
    """Rotate a head in place: each half times cos, plus the other half times signed sin."""
    half = size // 2
    for column in range(0, half, LANES):
        ends = column, column + half
        values = [code.load_halves(place, 2 * end) for end in ends]
        for end, value, other in zip(ends, values, values[::-1], strict=True):
            turned = code.build.fmul(other, code.load_halves(sin, 2 * end))
            turned = code.fma(value, code.load_halves(cos, 2 * end), turned)
            code.store_halves(turned, place, 2 * end)


class _Layer:
    def __init__(self, module: Module, shape: StackShape, threads: int) -> None:
        self.code = code = Code(module, "layer", ["run", "layer", "counters", "scratch", "me"])
        self.args, self.shape, self.threads = code.args, shape, threads
        self.run, self.layer = code.fields(code.args["run"], RUN_ARGS), code.fields(code.args["layer"], LAYER_FIELDS)
        self.following = code.fields(code.plus(code.args["layer"], 8 * len(LAYER_FIELDS)), LAYER_FIELDS)
        self.normed = code.args["scratch"]
        self.prepared, self.part = (code.plus(self.normed, self.run[name]) for name in ("at_prepared", "at_part"))
        self.rows, self.number = self.run["rows"], 0
        self.wide = shape.num_heads * shape.head_dim

    def write(self) -> None:
        """Write all phases; each prefetches what the next one begins with."""
        shape, layer = self.shape, self.layer
        per_head, size = shape.head_dim // TILE, shape.qkv_input_size or shape.hidden
        heads = max(1, round(self._chunk(shape.num_qkv_heads * shape.head_dim, size) / per_head))
        output, down = self._chunk(shape.hidden, self.wide), self._chunk(shape.hidden, shape.inner)
        gate = self._chunk(shape.inner, 2 * shape.hidden)
        ahead = self._fetch(layer["output"], output, self.wide)
        self._write_heads(heads, ahead)
        self._write_attention(ahead)
        ahead = self._fetch(layer["gate_up"], gate, shape.hidden)
        self._add_to_stream(self.run["attended"], self.wide, layer["output"], output, ahead)
        self._write_gate(gate, self._fetch(layer["down"], down, shape.inner))
        ahead = self._fetch(self.following["qkv"], heads * per_head, size)
        self._add_to_stream(self.run["inner"], shape.inner, layer["down"], down, ahead)
        self.code.done()

    def _phase(self, count: Any, ahead: Callable[[], None], prepare: Callable[[], None] | None = None) -> Any:
        """Run the code written within once for each of `count` chunks, by one of the threads.

        `prepare` writes what a thread does before its first chunk, `ahead` what it does before it waits for the others.
        """
        counters = self.code.plus(self.args["counters"], self.number * COUNTERS)
        self.number += 1
        return self.code.chunks(count, counters, prepare, ahead)

    def _chunk(self, num_out: int, size: int) -> int:
        return chunk_of(num_out, size, self.threads, self.shape.kind)

    def _fetch(self, weights: Any, some: int, size: int) -> Callable[[], None]:
        """Return a writer of a prefetch of the weights where this thread is likely to begin the next phase."""
        block = some * (size // GROUP) * BLOCKS[self.shape.kind]
        return lambda: self.code.fetch(self.code.plus(weights, self.code.times(self.args["me"], block)), _FETCHED)

    def _prepare(self, source: Any, size: int) -> None:
        self.code.run("prepare", source, 2 * size, size // GROUP, self.rows, self.prepared)

    def _norm(self, weight: Any) -> None:
        size, eps = self.shape.hidden, float_bits(self.shape.eps)
        self.code.run("norm", self.run["stream"], weight, self.normed, self.rows, size, eps)
        self._prepare(self.normed, size)

    def _multiply(self, source: Any, size: int, weights: Any, bounds: tuple[Any, Any], target: Any, width: int) -> None:
        """Multiply tiles of `weights` from bounds[0] up to bounds[1] by rows of `size`.

        The result of the first tile and row goes to `target`, that of the next row `width` bytes later.
        """
        first = self.code.minus(target, self.code.times(bounds[0], _TILE_BYTES))
        name, blocks = f"tiles_{self.shape.kind}", size // GROUP
        self.code.run(name, source, 2 * size, weights, first, width, blocks, *bounds, self.rows, self.prepared)

    def _write_heads(self, some: int, ahead: Callable[[], None]) -> None:
        code, shape, count = self.code, self.shape, self.shape.num_qkv_heads
        per_head, size = shape.head_dim // TILE, shape.qkv_input_size or shape.hidden
        source = self.run["qkv_input"] if shape.qkv_input_size else self.normed

        def prepare() -> None:
            if shape.qkv_input_size:
                self._prepare(source, size)
            else:
                self._norm(self.layer["attention_norm"])

        with self._phase(-(-count // some), ahead, prepare) as chunk:
            is_kept = code.build.icmp_signed("!=", self.layer["tap"], I64(0))
            # All others wait for this chunk before they change the stream.
            with code.when(code.build.and_(is_kept, code.build.icmp_signed("==", chunk, I64(0)))):
                self._keep_stream()
            first, last = code.bounds(chunk, some, count)
            bounds = code.times(first, per_head), code.times(last, per_head)
            target = code.plus(self.run["heads"], code.times(bounds[0], _TILE_BYTES))
            self._multiply(source, size, self.layer["qkv"], bounds, target, count * shape.head_dim * 2)
            with code.loop(first, last) as head:
                code.run("turn", self.args["run"], self.args["layer"], head)

    def _keep_stream(self) -> None:
        code, size = self.code, 2 * self.shape.hidden
        with code.loop(0, self.rows) as row:
            skipped = code.times(row, size)
            code.copy(code.plus(self.run["stream"], skipped), code.plus(self.layer["tap"], skipped), size)

    def _write_attention(self, ahead: Callable[[], None]) -> None:
        code, args = self.code, self.args
        with self._phase(self.run["num_items"], ahead) as chunk:
            item = code.plus(self.run["items"], code.times(chunk, 8 * len(ITEM_FIELDS)))
            code.run("attend", args["run"], args["layer"], item, args["scratch"])

    def _add_to_stream(self, source: Any, size: int, weights: Any, some: int, ahead: Callable[[], None]) -> None:
        code, count, width = self.code, self.shape.hidden // TILE, some * _TILE_BYTES
        with self._phase(-(-count // some), ahead, lambda: self._prepare(source, size)) as chunk:
            first, last = code.bounds(chunk, some, count)
            self._multiply(source, size, weights, (first, last), self.part, width)
            with code.loop(0, self.rows) as row, code.loop(first, last) as tile:
                made = self._made(row, code.minus(tile, first), width)
                place = self._place(self.run["stream"], row, tile, self.shape.hidden)
                code.store_halves(code.build.fadd(code.load_halves(place), code.load_halves(made)), place)

    def _write_gate(self, some: int, ahead: Callable[[], None]) -> None:
        code, shape, count = self.code, self.shape, self.shape.inner // TILE
        beside, width = some * _TILE_BYTES, 2 * some * _TILE_BYTES
        with self._phase(-(-count // some), ahead, lambda: self._norm(self.layer["mlp_norm"])) as chunk:
            first, last = code.bounds(chunk, some, count)
            for above, at in ((0, 0), (count, beside)):
                bounds = code.plus(first, above), code.plus(last, above)
                target = code.plus(self.part, at)
                self._multiply(self.normed, shape.hidden, self.layer["gate_up"], bounds, target, width)
            with code.loop(0, self.rows) as row, code.loop(first, last) as tile:
                made = self._made(row, code.minus(tile, first), width)
                gated = code.build.fmul(code.silu(code.load_halves(made)), code.load_halves(made, beside))
                code.store_halves(gated, self._place(self.run["inner"], row, tile, shape.inner))

    def _made(self, row: Any, number: Any, width: int) -> Any:
        """Return the address of a row's results of a tile of the chunk."""
        code = self.code
        return code.plus(self.part, code.times(row, width), code.times(number, _TILE_BYTES))

    def _place(self, base: Any, row: Any, tile: Any, size: int) -> Any:
        """Return the address of a row's 16 columns of a tile, among rows of `size`."""
        code = self.code
        return code.plus(base, code.times(row, 2 * size), code.times(tile, _TILE_BYTES))


def _write_ends(module: Module, shape: StackShape) -> None:
    """Write `begin_draft` and `end_draft`: functions of a run's and a head's fields, and counters.

    `end_draft` also takes a thread's own memory.
    """
    _write_begin(Code(module, "begin_draft", ["run", "head", "counters"]), shape)
    code = Code(module, "end_draft", ["run", "head", "counters", "scratch"])
    run, head = code.fields(code.args["run"], RUN_ARGS), code.fields(code.args["head"], HEAD_ARGS)
    _write_logits(code, shape, run, head)
    _write_candidates(code, shape, run, head)
    code.done()


def _write_begin(code: Code, shape: StackShape) -> None:
    """Write each row's normed embedding and normed feature, side by side, and its stream."""
    run, head = code.fields(code.args["run"], RUN_ARGS), code.fields(code.args["head"], HEAD_ARGS)
    size = 2 * shape.hidden
    with code.chunks(run["rows"], code.args["counters"]) as row:
        number = code.times(row, 8)
        token, feature = (
            code.plus(head[of], code.times(code.load_number(head[name], number), size))
            for name, of in (("tokens", "embedding"), ("taken", "features"))
        )
        qkv_input = code.plus(run["qkv_input"], code.times(row, 2 * size))
        normed = code.plus(qkv_input, size)
        for source, target, weight in ((token, qkv_input, "token_norm"), (feature, normed, "hidden_norm")):
            norm_row(code, source, target, head[weight], I64(shape.hidden), F32(shape.eps))
        is_normed = code.build.icmp_signed("!=", head["starts_normed"], I64(0))
        source = code.build.select(is_normed, normed, feature)
        code.copy(source, code.plus(run["stream"], code.times(row, size)), size)
    code.done()


def _write_logits(code: Code, shape: StackShape, run: dict[str, Any], head: dict[str, Any]) -> None:
    """Multiply the normed stream by the output matrix."""
    size, blocks = 2 * shape.hidden, shape.hidden // GROUP
    normed = code.args["scratch"]
    prepared = code.plus(normed, run["at_prepared"])

    def prepare() -> None:
        code.run("norm", run["stream"], head["final_norm"], normed, run["rows"], shape.hidden, float_bits(shape.eps))
        code.run_at(head["prepare"], normed, size, blocks, run["rows"], prepared)

    with code.chunks(head["num_chunks"], code.plus(code.args["counters"], COUNTERS), prepare) as chunk:
        bounds = code.bounds(chunk, head["chunk"], head["num_tiles"])
        width = code.times(head["num_tiles"], 4 * TILE)
        code.run_at(
            head["tiles"], normed, size, head["output"], head["logits"], width, blocks, *bounds, run["rows"], prepared
        )


def _write_candidates(code: Code, shape: StackShape, run: dict[str, Any], head: dict[str, Any]) -> None:
    """Write the feature that each row leaves to its children and, if wanted, the best of its divided logits."""
    size, build = 2 * shape.hidden, code.build
    num_out = code.times(head["num_tiles"], TILE)
    with code.chunks(run["rows"], code.plus(code.args["counters"], 2 * COUNTERS)) as row:
        stream = code.plus(run["stream"], code.times(row, size))
        place = code.load_number(head["left"], code.times(row, 8))
        target = code.plus(head["features"], code.times(place, size))
        is_normed = build.icmp_signed("!=", head["leaves_normed"], I64(0))
        with build.if_else(is_normed) as (normed, plain):
            with normed:
                norm_row(code, stream, target, head["final_norm"], I64(shape.hidden), F32(shape.eps))
            with plain:
                code.copy(stream, target, size)
        with code.when(build.icmp_signed(">", head["best"], I64(0))):
            logits = code.plus(head["logits"], code.times(code.times(row, num_out), 4))
            divisor = code.load_same(head["divisors"], code.times(row, 4))
            with code.loop(0, num_out, LANES) as first:
                at = code.times(first, 4)
                code.store(build.fdiv(code.load_vector(logits, at), divisor), logits, at)
            skipped = code.times(code.times(row, head["best"]), 4)
            results = (code.plus(head[name], skipped) for name in ("found", "scores"))
            code.run_at(head["top_k"], logits, 1, num_out, head["ids"], *results, head["best"])
