"""Decoder layers of few rows on a CPU as one function: threads enter it once, and go through all layers.

A layer has five phases (norm and q, k, v; attention; output; norm and gate; down). A phase is cut into chunks, which
threads take from a shared counter, so that none waits for a thread that the system has not scheduled.
After a phase, threads wait for its chunks by spinning: that takes less than a microsecond, while waking up takes tens.

A row's result does not depend on the rows beside it: sums run over columns and keys in order, and a key that a row does
not see adds zero. So a node of a tree has the same bits as if it were the only token of a forward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu import products
from kernels.cpu.isa import Isa, needed_isa
from kernels.cpu.layout import (
    COUNTERS,
    KEYS,
    LANES,
    LAYER_FIELDS,
    LINE,
    PHASES,
    RUN_ARGS,
    TILE,
    StackShape,
    chunk_of,
    prepared_size,
)  # fmt: skip
from kernels.cpu.products import MAX_ROWS, Packed
from kernels.cpu.rows import row_function


class LayerWeights(NamedTuple):
    """A layer's norms in float32, and its matrices. No `attention_norm` if the shape has `qkv_input_size`.

    `qkv_bias` float32 [num_qkv_heads * head_dim], `qk_norm` float32 [num_heads + num_kv_heads, head_dim].
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
        rows: number of rows, the next ones of the forward.
        slots: int64 [L], KV slots of the keys, in the order of the text.
        mask: bool [rows, K], which of the last K keys each row sees; all rows see the keys before. None: the last keys
            are the rows' own, and each row sees those up to its own.
    """

    rows: int
    slots: Tensor
    mask: Tensor | None


class DecoderStack:
    """The layers of a model, for rows in bfloat16, up to MAX_ROWS at a time."""

    def __init__(self, shape: StackShape, layers: Sequence[LayerWeights]) -> None:
        if not shape.fits:
            raise ValueError(f"{shape} has no function")
        self.shape, self._layers = shape, list(layers)
        # Compile here, since it takes a second, and not at the first forward.
        isa = needed_isa()
        row_function(isa, "norm")
        _compiled(isa, shape, products.num_threads())
        # After the last layer, its weights are prefetched again, and not used.
        self._table = np.zeros((len(layers) + 1, len(LAYER_FIELDS)), np.int64)
        for row, layer in zip(self._table, [*layers, layers[-1]], strict=True):
            found = {name: _address(value) for name, value in layer._asdict().items()}
            row[:] = [found.get(name, 0) for name in LAYER_FIELDS]
        self._known: tuple[tuple[Sequence[Tensor], Sequence[Tensor]], NDArray[np.int64]] = ((), ()), self._table

    @property
    def max_rows(self) -> int:
        """Most rows of a forward for which this is the fastest way: any number if codes are multiplied unconverted."""
        return sys.maxsize if needed_isa().has_dots(self.shape.kind) else MAX_ROWS

    def plan(
        self,
        queries: Sequence[Queries],
        own_slots: Tensor,
        positions: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> StackPlan:
        """Return the plan of a forward of up to MAX_ROWS rows.

        Args:
            queries: all rows of the forward.
            own_slots: int64 [M], slots for keys and values of the rows.
            positions: int64 [M], of the rows.
            angles: cos and signed sin of all positions, bfloat16 [more than any position, 1, head_dim], as in
                outrider.layers.rotary.
            caches: keys and values of each layer, bfloat16 [slots, num_kv_heads, head_dim].
        """
        known, table = self._known
        if known[0] is not caches[0] or known[1] is not caches[1]:
            table = self._table.copy()
            for name, tensors in zip(("keys", "values"), caches, strict=True):
                table[:-1, LAYER_FIELDS.index(name)] = [tensor.data_ptr() for tensor in tensors]
            self._known = caches, table
        return StackPlan(self.shape, table.copy(), queries, own_slots, positions, angles)


def pieces(
    queries: Sequence[Queries], own_slots: Tensor, positions: Tensor
) -> Iterator[tuple[list[Queries], Tensor, Tensor]]:
    """Cut a forward into pieces of MAX_ROWS rows, to run one after the other; the last may have fewer.

    If there are several, no row may see the key of a later one.
    """
    slots, places = iter(own_slots.split(MAX_ROWS)), iter(positions.split(MAX_ROWS))
    piece: list[Queries] = []
    room = MAX_ROWS
    for part in queries:
        first = 0
        while first < part.rows:
            last = min(part.rows, first + room)
            piece.append(_some_rows(part, first, last))
            first, room = last, room - (last - first)
            if not room:
                yield piece, next(slots), next(places)
                piece, room = [], MAX_ROWS
    if piece:
        yield piece, next(slots), next(places)


def _some_rows(part: Queries, first: int, last: int) -> Queries:
    """Return some of the rows, without the keys after the last that one of them sees."""
    if last - first == part.rows:
        return part
    if part.mask is None:
        return Queries(last - first, part.slots[: len(part.slots) - part.rows + last], None)
    mask = part.mask[first:last]
    unseen = mask.shape[1] - 1 - int(mask.any(0).nonzero()[-1])
    return Queries(last - first, part.slots[: len(part.slots) - unseen], mask[:, : mask.shape[1] - unseen])


def mask_of(part: Queries) -> Tensor | None:
    """Return the mask for the function, None if all rows see all keys. Pieces are small, so a mask costs little."""
    if part.mask is None and part.rows > 1:
        return torch.ones(part.rows, part.rows, dtype=torch.bool).tril()
    return None if part.mask is None else part.mask.contiguous()


def _address(value: Tensor | Packed | None) -> int:
    if value is None:
        return 0
    return (value.blocks if isinstance(value, Packed) else value).data_ptr()


class HeadCall(NamedTuple):
    """Arguments of a step of a draft head: the address of its HEAD_ARGS or 0, and its product's prepared bytes."""

    address: int
    prepared: int


NO_HEAD = HeadCall(0, 0)


class StackPlan:
    """The tables of a forward of a stack."""

    def __init__(
        self,
        shape: StackShape,
        table: NDArray[np.int64],
        queries: Sequence[Queries],
        own_slots: Tensor,
        positions: Tensor,
        angles: tuple[Tensor, Tensor],
    ) -> None:
        rows = own_slots.numel()
        if rows != sum(part.rows for part in queries) or not 0 < rows <= MAX_ROWS:
            raise ValueError(f"{rows} slots for {sum(part.rows for part in queries)} rows; {MAX_ROWS} can be taken")
        _check_numbers(queries, own_slots, positions)
        _check_angles(shape, positions, own_slots, angles)
        self._table, self._shape = table, shape
        self.rows = rows
        self._threads = products.num_threads()
        masks = [mask_of(part) for part in queries]
        lines, items, first, most = [], [], 0, LANES // shape.group
        for number, (part, mask) in enumerate(zip(queries, masks, strict=True)):
            masked = (0, 0) if mask is None else (mask.data_ptr(), mask.shape[1])
            lines.append((part.slots.data_ptr(), part.slots.numel(), first, *masked))
            for start in range(0, part.rows, most):
                some = min(part.rows - start, most)
                items += [(number, head, start, some) for head in range(shape.num_kv_heads)]
            first += part.rows
        self._queries, self._items = np.array(lines, np.int64), np.array(items, np.int64)
        self._most_keys = max(line[1] for line in lines)
        self._kept = (queries, masks, angles, own_slots, positions)
        self._fields = dict.fromkeys(RUN_ARGS, 0)
        self._fields |= {
            "rows": rows, "cos": angles[0].data_ptr(), "sin": angles[1].data_ptr(), "slots": own_slots.data_ptr(),
            "positions": positions.data_ptr(), "items": self._items.ctypes.data, "num_items": len(items),
            "queries": self._queries.ctypes.data,
        }  # fmt: skip
        self._isa = needed_isa()
        self._function = _compiled(self._isa, shape, self._threads)

    def run(
        self,
        stream: Tensor,
        taps: Mapping[int, Tensor] = MappingProxyType({}),
        qkv_input: Tensor | None = None,
        head: HeadCall = NO_HEAD,
    ) -> None:
        """Run all layers on the residual stream bfloat16 [M, hidden], in place.

        Args:
            stream: the input, unless `head` computes it.
            taps: by layer, tensors like the stream, to which the stream is copied as it enters the layer.
            qkv_input: bfloat16 [M, shape.qkv_input_size], the input of q, k and v; None if that size is 0.
            head: what else a step of a draft head does.
        """
        self._check(stream, taps, qkv_input)
        self._table[:, _TAP] = 0
        for layer, kept in taps.items():
            self._table[layer, _TAP] = kept.data_ptr()
        shape, rows, count = self._shape, self.rows, len(self._table) - 1
        places, size = _scratch(self._isa, shape, rows, self._threads, head.prepared)
        size += (self._most_keys + KEYS + 1) * LINE
        qkv, wide = shape.num_qkv_heads * shape.head_dim, shape.num_heads * shape.head_dim
        shared, counted = _room(2 * rows * (qkv + wide + shape.inner)), (count + 1) * PHASES * COUNTERS
        memory = _spare.take(size * self._threads + shared + counted)
        heads = memory.data_ptr() + -memory.data_ptr() % LINE
        fields = self._fields | places | {
            "stream": stream.data_ptr(), "draft_head": head.address,
            "qkv_input": 0 if qkv_input is None else qkv_input.data_ptr(),
            "num_layers": count, "layers": self._table.ctypes.data,
            "heads": heads, "attended": heads + 2 * rows * qkv, "inner": heads + 2 * rows * (qkv + wide),
            "counters": heads + shared, "counter_bytes": counted,
            "scratch": heads + shared + counted, "scratch_size": size,
        }  # fmt: skip
        self._function(*fields.values(), *products.pool(self._threads))
        _spare.give(memory)

    def _check(self, stream: Tensor, taps: Mapping[int, Tensor], qkv_input: Tensor | None) -> None:
        if any(not 0 <= layer < len(self._table) - 1 for layer in taps):
            raise ValueError(f"streams of layers {[*taps]}; there are {len(self._table) - 1}")
        wanted = (self.rows, self._shape.hidden)
        for rows in (stream, *taps.values()):
            if rows.dtype != torch.bfloat16 or rows.shape != wanted or not rows.is_contiguous():
                raise ValueError(f"{rows.dtype} {tuple(rows.shape)} is no stream of {self.rows} rows in bfloat16")
        wanted = (self.rows, self._shape.qkv_input_size)
        if self._shape.qkv_input_size and (
            qkv_input is None or qkv_input.shape != wanted or not qkv_input.is_contiguous()
        ):
            raise ValueError(f"a layer of this stack needs rows {list(wanted)} beside its stream")


class _Spare:
    """Memory of runs, kept from one to the next, since new memory costs a fault for each of its pages.

    The memory of one run is kept for each thread that calls at the same time.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Return at least `size` bytes, with room to align their start to a cache line."""
        try:
            found = self._kept.pop()
        except IndexError:
            found = torch.empty(0, dtype=torch.uint8)
        # A text grows by a key a round, so leave room for many more.
        needed = size + LINE
        return found if found.numel() >= needed else torch.empty(1 << (needed - 1).bit_length(), dtype=torch.uint8)

    def give(self, memory: Tensor) -> None:
        """Keep memory for later runs."""
        self._kept.append(memory)


_spare = _Spare()
_TAP = LAYER_FIELDS.index("tap")


def _room(size: int) -> int:
    """Return `size` rounded up to whole cache lines."""
    return -(-size // LINE) * LINE


def _check_numbers(queries: Sequence[Queries], *numbers: Tensor) -> None:
    """Check tensors that the function reads as raw memory."""
    for found in (*numbers, *(part.slots for part in queries)):
        if found.dtype != torch.int64 or not found.is_contiguous():
            raise ValueError("slots and positions are int64, side by side")
    for part in queries:
        if part.mask is not None and (part.mask.dtype != torch.bool or len(part.mask) != part.rows):
            raise ValueError("a mask is bool, with a row for each query")


def _check_angles(shape: StackShape, positions: Tensor, own_slots: Tensor, angles: tuple[Tensor, Tensor]) -> None:
    """Check the tables of angles, and that all positions are within them."""
    for table in angles:
        is_table = table.dtype == torch.bfloat16 and table.is_contiguous()
        if not is_table or table.shape != (len(angles[0]), 1, shape.head_dim):
            raise ValueError(f"angles are bfloat16 [positions, 1, {shape.head_dim}], side by side")
    least, largest = positions.aminmax()
    if positions.shape != own_slots.shape or int(least) < 0 or int(largest) >= len(angles[0]):
        raise ValueError(f"{len(own_slots)} rows need as many positions from 0 up to {len(angles[0])}")


@cache
def _scratch(isa: Isa, shape: StackShape, rows: int, threads: int, more_prepared: int) -> tuple[dict[str, int], int]:
    """Return offsets of the parts of a thread's own memory after normed rows, and of the last part, the scores.

    Scores take a line for each key. `more_prepared`: minimum bytes of prepared rows.
    """
    widest = max(shape.hidden, shape.inner, shape.qkv_input_size, shape.num_heads * shape.head_dim)
    part = max(2 * chunk_of(shape.inner, 2 * shape.hidden, threads, shape.kind), *(
        chunk_of(shape.hidden, size, threads, shape.kind) for size in (shape.inner, shape.num_heads * shape.head_dim)
    ))  # fmt: skip
    sizes = {
        "normed": rows * shape.hidden * 2,
        "at_prepared": max(prepared_size(shape.kind, rows, widest, isa), more_prepared),
        "at_part": rows * part * TILE * 2,
        "at_queries": shape.head_dim * 4 * LANES,
    }
    found, size = {}, 0
    for name, need in sizes.items():
        found[name] = size
        size += _room(need)
    del found["normed"]
    return found | {"at_scores": size}, size


@cache
def _compiled(isa: Isa, shape: StackShape, threads: int) -> Any:
    """Return the compiled function `run`, of RUN_ARGS and threads."""
    from kernels.cpu import code
    from kernels.cpu.layer_code import layers_module

    def layers() -> Any:
        return code.optimized(layers_module(isa, shape, threads))

    parts = products.part_of(isa, shape.kind) | {f"layers {shape} {threads}": layers}
    return code.function(code.compiled(isa, parts), "run", len(RUN_ARGS) + 2)
