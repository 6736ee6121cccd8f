"""Decoder layers of few rows on a CPU as one function: torch's threads enter it once, and go through all layers.

A layer is five phases (norm and q, k, v; attention; output; norm and gate; down). A phase is cut in chunks, which
threads take from a shared counter as they come, so that nobody waits for a thread that the system has not let run.
Behind a phase they wait for its chunks, awake: that takes less than a microsecond where waking takes tens.

A row's result does not depend on the rows beside it: sums run over columns and keys in their own order alone, and a key
that a row does not see adds a zero. So a node of a tree has the bits that it would have as the only token of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import products
from kernels.cpu.layout import ITEM, KEYS, LANES, LAYER, QUERIES, RUN, StackShape
from kernels.cpu.norm import float_bits
from kernels.cpu.products import BLOCKS, GROUP, MAX_ROWS, TILE, Packed

if TYPE_CHECKING:
    from kernels.cpu.code import Code

__all__ = ["MAX_ROWS", "DecoderStack", "LayerWeights", "Queries", "StackShape"]

_COUNTERS = 128
"""Bytes of a phase's counters: chunks taken, and, in a cache line of its own, chunks done."""
_PHASES = 5
_CHUNK = 256 << 10
"""Bytes of weights that a thread takes at a time."""
_FETCHED = 8 << 10
"""Bytes of weights that are asked of memory before a phase begins."""


class LayerWeights(NamedTuple):
    """A layer's: norms in float32, and matrices. Where the input of q, k and v is given, it has no `attention_norm`.

    `qkv_bias` float32 [num_all * head_dim], `qk_norm` float32 [num_heads + num_kv_heads, head_dim].
    """

    attention_norm: Tensor | None
    qkv: Packed
    output: Packed
    mlp_norm: Tensor
    gate_up: Packed
    down: Packed
    qkv_bias: Tensor | None = None
    qk_norm: Tensor | None = None


class Queries(NamedTuple):
    """Rows of a forward that share their keys.

    Attributes:
        rows: how many, the next ones of the forward.
        slots: int64 [L], KV slots of the keys, in the order of the text.
        mask: bool [rows, K], who sees which of the last K keys; all see those before. None: all see all.
    """

    rows: int
    slots: Tensor
    mask: Tensor | None


class DecoderStack:
    """The layers of a model, for up to MAX_ROWS rows in bfloat16."""

    def __init__(self, shape: StackShape, layers: Sequence[LayerWeights]) -> None:
        if not shape.fits:
            raise ValueError(f"{shape} has no function")
        self._shape, self._layers = shape, list(layers)
        # Behind the last layer its weights are asked of memory again, in vain.
        self._table = np.zeros((len(layers) + 1, len(LAYER)), np.int64)
        for row, layer in zip(self._table, [*layers, layers[-1]], strict=True):
            found = {name: _address(value) for name, value in layer._asdict().items()}
            row[:] = [found.get(name, 0) for name in LAYER]

    def plan(
        self,
        queries: Sequence[Queries],
        own_slots: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> StackPlan:
        """What all runs of a forward share.

        Args:
            queries: all rows of the forward.
            own_slots: int64 [M], where keys and values of the rows go.
            angles: cos and signed sin, each [M, head_dim], as outrider.layers.rotary has them.
            caches: keys and values of each layer, bfloat16 [slots, num_kv_heads, head_dim].
        """
        table = self._table.copy()
        for place, tensors in zip((LAYER.index("keys"), LAYER.index("values")), caches, strict=True):
            table[:-1, place] = [tensor.data_ptr() for tensor in tensors]
        return StackPlan(self._shape, table, queries, own_slots, angles)


def _address(value: Tensor | Packed | None) -> int:
    if value is None:
        return 0
    return (value.blocks if isinstance(value, Packed) else value).data_ptr()


class StackPlan:
    """A forward of a stack: its tables, and the memory that threads share."""

    def __init__(
        self,
        shape: StackShape,
        table: np.ndarray[Any, np.dtype[np.int64]],
        queries: Sequence[Queries],
        own_slots: Tensor,
        angles: tuple[Tensor, Tensor],
    ) -> None:
        rows = own_slots.numel()
        if rows != sum(part.rows for part in queries) or not 0 < rows <= MAX_ROWS:
            raise ValueError(f"{rows} slots for {sum(part.rows for part in queries)} rows; {MAX_ROWS} can be taken")
        _check(queries, own_slots)
        self._table, self._rows, self._given = table, rows, shape.given
        self._threads = products.num_threads()
        masks = [None if part.mask is None else part.mask.contiguous() for part in queries]
        cos, sin = (part.float().contiguous() for part in angles)
        self._queries, items, first = np.zeros((len(queries), len(QUERIES)), np.int64), [], 0
        most = LANES // shape.group
        for number, (part, mask) in enumerate(zip(queries, masks, strict=True)):
            masked = (0, 0) if mask is None else (mask.data_ptr(), mask.shape[1])
            self._queries[number] = part.slots.data_ptr(), part.slots.numel(), first, *masked
            for start in range(0, part.rows, most):
                some = min(part.rows - start, most)
                items += [(number, head, start, some) for head in range(shape.num_kv_heads)]
            first += part.rows
        self._items = np.array(items, np.int64)
        qkv, wide = shape.num_all * shape.head_dim, shape.num_heads * shape.head_dim
        self._shared = torch.empty(rows * (qkv + wide + shape.inner), dtype=torch.bfloat16)
        self._counters = torch.empty(len(table) * _PHASES * _COUNTERS, dtype=torch.uint8)
        at, size = _scratch(shape, rows, self._threads, self._queries)
        self._scratch = torch.empty(size * self._threads + 64, dtype=torch.uint8)
        self._kept = (queries, masks, cos, sin, own_slots)
        heads = self._shared.data_ptr()
        self._fields = dict.fromkeys(RUN, 0) | at
        self._fields |= {
            "rows": rows, "cos": cos.data_ptr(), "sin": sin.data_ptr(), "slots": own_slots.data_ptr(),
            "items": self._items.ctypes.data, "num_items": len(items), "queries": self._queries.ctypes.data,
            "heads": heads, "attended": heads + rows * qkv * 2, "inner": heads + rows * (qkv + wide) * 2,
            "scratch": self._scratch.data_ptr() + -self._scratch.data_ptr() % 64, "scratch_size": size,
            "counters": self._counters.data_ptr(),
        }  # fmt: skip
        self._function = _compiled(shape, self._threads)
        self._pool = products.pool(self._threads)

    def run(self, stream: Tensor, first: int, last: int, given: Tensor | None = None) -> None:
        """Layers `first` up to `last` of the residual stream bfloat16 [M, hidden], in its place.

        `given` bfloat16 [M, shape.given] is what a layer's q, k and v are made of, if the shape says so.
        """
        if stream.dtype != torch.bfloat16 or not stream.is_contiguous() or stream.shape[0] != self._rows:
            raise ValueError(f"{stream.dtype} {tuple(stream.shape)} is no stream of {self._rows} rows in bfloat16")
        wanted = (self._rows, self._given)
        if self._given and (given is None or given.shape != wanted or not given.is_contiguous()):
            raise ValueError(f"a layer of this stack needs rows {list(wanted)} beside its stream")
        fields = self._fields
        fields["given"] = 0 if given is None else given.data_ptr()
        fields["stream"], fields["num_layers"] = stream.data_ptr(), last - first
        fields["layers"] = self._table.ctypes.data + first * self._table.strides[0]
        self._function(*fields.values(), *self._pool)


def _check(queries: Sequence[Queries], own_slots: Tensor) -> None:
    """What the function reads as it lies."""
    for slots in (own_slots, *(part.slots for part in queries)):
        if slots.dtype != torch.int64 or not slots.is_contiguous():
            raise ValueError("slots are int64, side by side")
    for part in queries:
        if part.mask is not None and (part.mask.dtype != torch.bool or len(part.mask) != part.rows):
            raise ValueError("a mask is bool, with a row for each query")


def _scratch(
    shape: StackShape, rows: int, threads: int, queries: np.ndarray[Any, np.dtype[np.int64]]
) -> tuple[dict[str, int], int]:
    """Where each part of a thread's own memory begins, behind normed rows, and the size of it all, in bytes."""
    keys, masked = int(queries[:, 1].max()), int(queries[:, 4].max())
    widest = max(shape.hidden, shape.inner, shape.given, shape.num_heads * shape.head_dim)
    part = max(2 * _chunk(shape.inner, 2 * shape.hidden, threads, shape.kind), *(
        _chunk(shape.hidden, size, threads, shape.kind) for size in (shape.inner, shape.num_heads * shape.head_dim)
    ))  # fmt: skip
    sizes = {
        "normed": rows * shape.hidden * 2,
        "at_sums": -(-rows // LANES) * widest // GROUP * 64,
        "at_part": rows * part * TILE * 2,
        "at_pairs": shape.head_dim * 32,
        "at_seen": masked * 2,
        "at_scores": (keys + KEYS + 1) * 64,
    }
    found, size = {}, 0
    for name, need in sizes.items():
        found[name] = size
        size += -(-need // 64) * 64
    del found["normed"]
    return found, size


def _chunk(num_out: int, size: int, threads: int, kind: str) -> int:
    """Tiles of a matrix that a thread takes at a time: so that there are some for each, and not too many."""
    tiles = num_out // TILE
    chunks = max(2 * threads, tiles * (size // GROUP) * BLOCKS[kind] // _CHUNK)
    return max(1, -(-tiles // chunks))


@cache
def _compiled(shape: StackShape, threads: int) -> Any:
    """The function `run`, of RUN and threads."""
    from kernels.cpu import code

    if not products.has_amx():
        raise RuntimeError("few rows of a whole model need Linux, a processor with AMX, and llvmlite")
    engine = code.compiled(*products.modules(shape.kind), code.made(_module(shape, threads)))
    found = code.function(engine, "run", len(RUN) + 2)
    found.engine = engine
    return found


def _module(shape: StackShape, threads: int) -> Any:
    from llvmlite import ir

    from kernels.cpu.attention import write_attention
    from kernels.cpu.norm import write_norm
    from kernels.cpu.pool import write_call

    module = ir.Module()
    write_norm(module)
    _write_turn(module, shape)
    write_attention(module, shape)
    _write_layer(module, shape, threads)
    _write_part(module)
    write_call(module, "run", RUN, "all_layers", ("counters", _PHASES * _COUNTERS, "num_layers"))
    return module


def _write_part(module: Any) -> None:
    """All layers, in one of the threads."""
    from kernels.cpu.code import Code

    code = Code(module, "all_layers", ["run", "me"])
    run, me = code.fields(code.args["run"], RUN), code.args["me"]
    scratch = code.plus(run["scratch"], code.times(me, run["scratch_size"]))
    with code.loop(0, run["num_layers"]) as number:
        layer = code.plus(run["layers"], code.times(number, 8 * len(LAYER)))
        counters = code.plus(run["counters"], code.times(number, _PHASES * _COUNTERS))
        code.run("layer", code.args["run"], layer, counters, scratch, me)
    code.done()


def _write_turn(module: Any, shape: StackShape) -> None:
    """A head of q, k or v of all rows: bias, norm and rotation in its place, then to the cache unless it is of q."""
    from kernels.cpu.code import F32, I64, Code
    from kernels.cpu.norm import norm_row

    code = Code(module, "turn", ["run", "layer", "head"])
    run, layer, head = code.fields(code.args["run"], RUN), code.fields(code.args["layer"], LAYER), code.args["head"]
    size, half, num_turned = shape.head_dim, shape.head_dim // 2, shape.num_heads + shape.num_kv_heads
    is_turned = code.build.icmp_signed("<", head, I64(num_turned))
    with code.loop(0, run["rows"]) as row:
        place = code.plus(run["heads"], code.times(code.plus(code.times(row, shape.num_all), head), 2 * size))
        if shape.has_bias:
            bias = code.plus(layer["qkv_bias"], code.times(head, 4 * size))
            for column in range(0, size, LANES):
                total = code.build.fadd(code.load_halves(place, 2 * column), code.load_vector(bias, 4 * column))
                code.store_halves(total, place, 2 * column)
        with code.when(is_turned):
            if shape.has_qk_norm:
                weight = code.plus(layer["qk_norm"], code.times(head, 4 * size))
                norm_row(code, place, place, weight, I64(size), F32(shape.eps))
            angles = code.times(row, 4 * size)
            cos, sin = (code.plus(run[name], angles) for name in ("cos", "sin"))
            for column in range(0, half, LANES):
                ends = column, column + half
                values = [code.load_halves(place, 2 * end) for end in ends]
                for end, value, other in zip(ends, values, values[::-1], strict=True):
                    turned = code.build.fmul(other, code.load_vector(sin, 4 * end))
                    turned = code.fma(value, code.load_vector(cos, 4 * end), turned)
                    code.store_halves(turned, place, 2 * end)
        slot = code.load_number(run["slots"], code.times(row, 8))
        for name, before in (("keys", shape.num_heads), ("values", num_turned)):
            kv_head = code.plus(head, -before)
            with code.when(code.between(-1, kv_head, shape.num_kv_heads - 1)):
                target = code.times(code.plus(code.times(slot, shape.num_kv_heads), kv_head), 2 * size)
                for column in range(0, size, LANES):
                    code.store_halves(code.load_halves(place, 2 * column), code.plus(layer[name], target), 2 * column)
    code.done()


def _write_layer(module: Any, shape: StackShape, threads: int) -> None:
    """A layer, as one of the threads goes through it."""
    from kernels.cpu.code import Code

    code = Code(module, "layer", ["run", "layer", "counters", "scratch", "me"])
    args = code.args
    run, layer = code.fields(args["run"], RUN), code.fields(args["layer"], LAYER)
    normed, sums, part = (args["scratch"], *(code.plus(args["scratch"], run[name]) for name in ("at_sums", "at_part")))
    rows, hidden = run["rows"], shape.hidden
    following = code.fields(code.plus(args["layer"], 8 * len(LAYER)), LAYER)
    writer = _Phases(code, args["counters"])

    def fetch(weights: Any, some: int, size: int) -> Callable[[], None]:
        """Ask memory for where this thread is likely to begin in the next phase."""
        block = some * (size // GROUP) * BLOCKS[shape.kind]
        return lambda: code.fetch(code.plus(weights, code.times(args["me"], block)), _FETCHED)

    def sum_up(source: Any, size: int) -> None:
        if shape.kind == "four":
            code.run("sums", source, 2 * size, size // GROUP, rows, sums)

    def norm(weight: Any) -> None:
        code.run("norm", run["stream"], weight, normed, rows, hidden, float_bits(shape.eps))
        sum_up(normed, hidden)

    def multiply(source: Any, size: int, weights: Any, bounds: tuple[Any, Any], target: Any, width: Any) -> None:
        """Some tiles of `weights` times rows of `size`, to rows of `width` bytes."""
        code.run(f"tiles_{shape.kind}", source, 2 * size, weights, target, width, size // GROUP, *bounds, rows, sums)

    def add_to_stream(source: Any, size: int, weights: Any, some: int, ahead: Callable[[], None]) -> None:
        with writer.phase(-(-hidden // TILE // some), ahead, lambda: sum_up(source, size)) as chunk:
            first, last = code.bounds(chunk, some, hidden // TILE)
            multiply(
                source, size, weights, (first, last), code.minus(part, code.times(first, 2 * TILE)), some * 2 * TILE
            )
            with code.loop(0, rows) as row, code.loop(first, last) as tile:
                own = code.plus(code.times(row, some * 2 * TILE), code.times(code.minus(tile, first), 2 * TILE))
                place = code.plus(run["stream"], code.times(row, 2 * hidden), code.times(tile, 2 * TILE))
                total = code.build.fadd(code.load_halves(place), code.load_halves(code.plus(part, own)))
                code.store_halves(total, place)

    per_head, num_all = shape.head_dim // TILE, shape.num_all
    num_inner, width = shape.inner // TILE, shape.num_heads * shape.head_dim
    of_heads = max(1, round(_chunk(num_all * shape.head_dim, shape.given or hidden, threads, shape.kind) / per_head))
    of_output = _chunk(hidden, width, threads, shape.kind)
    of_gate = _chunk(shape.inner, 2 * hidden, threads, shape.kind)
    of_down = _chunk(hidden, shape.inner, threads, shape.kind)
    ahead = fetch(layer["output"], of_output, width)
    source, size = (run["given"], shape.given) if shape.given else (normed, hidden)

    def prepare() -> None:
        if shape.given:
            sum_up(source, size)
        else:
            norm(layer["attention_norm"])

    with writer.phase(-(-num_all // of_heads), ahead, prepare) as chunk:
        first, last = code.bounds(chunk, of_heads, num_all)
        tiles = code.times(first, per_head), code.times(last, per_head)
        multiply(source, size, layer["qkv"], tiles, run["heads"], num_all * shape.head_dim * 2)
        with code.loop(first, last) as head:
            code.run("turn", args["run"], args["layer"], head)
    with writer.phase(run["num_items"], ahead) as chunk:
        item = code.plus(run["items"], code.times(chunk, 8 * len(ITEM)))
        code.run("attend", args["run"], args["layer"], item, args["scratch"])
    ahead = fetch(layer["gate_up"], of_gate, hidden)
    add_to_stream(run["attended"], width, layer["output"], of_output, ahead)
    ahead = fetch(layer["down"], of_down, shape.inner)
    with writer.phase(-(-num_inner // of_gate), ahead, lambda: norm(layer["mlp_norm"])) as chunk:
        first, last = code.bounds(chunk, of_gate, num_inner)
        some, width = of_gate, 2 * of_gate * 2 * TILE
        for above, at in ((0, 0), (num_inner, some * 2 * TILE)):
            bounds = code.plus(first, above), code.plus(last, above)
            target = code.minus(code.plus(part, at), code.times(bounds[0], 2 * TILE))
            multiply(normed, hidden, layer["gate_up"], bounds, target, width)
        with code.loop(0, rows) as row, code.loop(first, last) as tile:
            own = code.plus(part, code.times(row, width), code.times(code.minus(tile, first), 2 * TILE))
            gated = code.build.fmul(code.silu(code.load_halves(own)), code.load_halves(own, some * 2 * TILE))
            code.store_halves(
                gated, code.plus(run["inner"], code.times(row, 2 * shape.inner), code.times(tile, 2 * TILE))
            )
    ahead = fetch(following["qkv"], of_heads * per_head, shape.given or hidden)
    add_to_stream(run["inner"], shape.inner, layer["down"], of_down, ahead)
    code.done()


class _Phases:
    """Writes the phases of a layer one behind the other."""

    def __init__(self, code: Code, counters: Any) -> None:
        self._code, self._counters, self._number = code, counters, 0

    def phase(self, count: Any, ahead: Callable[[], None], prepare: Callable[[], None] | None = None) -> Any:
        """What is written within is done once for each of `count` chunks, by one of the threads. Before its first chunk
        a thread does what `prepare` writes, and behind its last one, before it waits for the others, `ahead`."""
        at = self._number * _COUNTERS
        self._number += 1
        return self._code.chunks(count, self._counters, at, at + _COUNTERS // 2, prepare, ahead)
