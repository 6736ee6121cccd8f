"""Decoder layers of few rows on a CPU as one function: threads enter it once, and go through all layers.

A layer is five phases (norm and q, k, v; attention; output; norm and gate; down). A phase is cut in chunks, which
threads take from a shared counter as they come, so that nobody waits for a thread that the system has not let run.
Behind a phase they wait for its chunks, awake: that takes less than a microsecond where waking takes tens.

A row's result does not depend on the rows beside it: sums run over columns and keys in their own order alone, and a key
that a row does not see adds a zero. So a node of a tree has the bits that it would have as the only token of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import products
from kernels.cpu.isa import Isa, needed_isa
from kernels.cpu.layout import (
    COUNTERS,
    KEYS,
    LANES,
    LAYER,
    PHASES,
    QUERIES,
    RUN,
    TILE,
    StackShape,
    chunk_of,
    prepared_size,
)  # fmt: skip
from kernels.cpu.norm import compiled_norm
from kernels.cpu.products import MAX_ROWS, Packed

__all__ = ["MAX_ROWS", "DecoderStack", "LayerWeights", "Queries", "StackShape"]


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
        # Here and not at the first forward, which would take a second.
        isa = needed_isa()
        compiled_norm(isa)
        _compiled(isa, shape, products.num_threads())
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
        self._counters = torch.empty(len(table) * PHASES * COUNTERS, dtype=torch.uint8)
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
        self._function = _compiled(needed_isa(), shape, self._threads)
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
    part = max(2 * chunk_of(shape.inner, 2 * shape.hidden, threads, shape.kind), *(
        chunk_of(shape.hidden, size, threads, shape.kind) for size in (shape.inner, shape.num_heads * shape.head_dim)
    ))  # fmt: skip
    sizes = {
        "normed": rows * shape.hidden * 2,
        "at_prepared": prepared_size(shape.kind, rows, widest, needed_isa()),
        "at_part": rows * part * TILE * 2,
        "at_queries": shape.head_dim * 4 * LANES,
        "at_seen": masked * 2,
        "at_scores": (keys + KEYS + 1) * 64,
    }
    found, size = {}, 0
    for name, need in sizes.items():
        found[name] = size
        size += -(-need // 64) * 64
    del found["normed"]
    return found, size


@cache
def _compiled(isa: Isa, shape: StackShape, threads: int) -> Any:
    """The function `run`, of RUN and threads."""
    from kernels.cpu import code
    from kernels.cpu.layer_code import layers_module

    engine = code.compiled(isa, *products.modules(isa, shape.kind), code.made(layers_module(isa, shape, threads)))
    return code.function(engine, "run", len(RUN) + 2)
