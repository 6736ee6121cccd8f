"""Triton kernels of kernels.exchange."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.exchange_state import NUM_TURNS, Mailboxes
from kernels.jit.elementwise import row_warps
from kernels.launch import power_of_two, starts_early

TURNS = tl.constexpr(NUM_TURNS)


@triton.jit
def _box(table, rank, words: tl.constexpr):
    """Return a pointer to the mailboxes of a rank, as words."""
    pointer = tl.load(table + rank).to(tl.pointer_type(words))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _plain(values):
    """Replace -0.0, which marks an empty place, by 0.0."""
    return tl.where(values == 0, tl.zeros_like(values), values)


@triton.jit
def _now(ON_GPU: tl.constexpr):
    """Return the time in nanoseconds; always 0 in the interpreter."""
    now = tl.extra.cuda.globaltimer() if ON_GPU else tl.zeros([], tl.int64)
    return now.to(tl.int64)


@triton.jit
def _or_give_up(missing, begin, looks, failed, report, limit, ON_GPU: tl.constexpr):
    """Return `missing`, or 0 to stop waiting for rank `missing` - 1, after setting `failed` and `report`."""
    late = looks >= limit
    if ON_GPU:
        late = (_now(ON_GPU) - begin >= limit) | (tl.load(failed, volatile=True) > 0)
    late = late & (missing > 0)
    if late:
        tl.store(failed, missing)
        tl.store(report, missing)
    return tl.where(late, 0, missing)


@triton.jit
def _take(box, source, inside, failed, report, limit, empty: tl.constexpr, ON_GPU: tl.constexpr):
    """Wait until rank `source` has written all words at `box`, and return them."""
    words = tl.load(box, mask=inside, other=0, volatile=True)
    begin, looks = _now(ON_GPU), tl.zeros([], tl.int64)
    missing = tl.max((words == empty).to(tl.int32), 0) * (source + 1)
    while missing > 0:
        looks += 1
        words = tl.load(box, mask=inside, other=0, volatile=True)
        missing = tl.max((words == empty).to(tl.int32), 0) * (source + 1)
        missing = _or_give_up(missing, begin, looks, failed, report, limit, ON_GPU)
    return words


@triton.jit
def _send(table, other, place, values, inside):
    """Write words into the mailboxes of rank `other`."""
    tl.store(_box(table, other, values.dtype) + place, values, mask=inside)


@triton.jit
def _look(box, inside, plane, dtype: tl.constexpr, empty: tl.constexpr, BLOCK: tl.constexpr, WORLD: tl.constexpr):
    """Return the float32 sum over ranks in their order, and 1 + the last rank with a missing number, or 0."""
    total = tl.zeros([BLOCK], tl.float32)
    missing = tl.zeros([BLOCK], tl.int32)
    for source in tl.static_range(WORLD):
        words = tl.load(box + source * plane, mask=inside, other=0, volatile=True)
        missing = tl.where(words == empty, source + 1, missing)
        total += words.to(dtype, bitcast=True).to(tl.float32)
    return total, tl.max(missing, 0)


@triton.jit
def _take_sum(
    box, inside, plane, failed, report, limit,
    dtype: tl.constexpr, empty: tl.constexpr, BLOCK: tl.constexpr, WORLD: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks have written their planes of `box`, and return the sum."""
    total, missing = _look(box, inside, plane, dtype, empty, BLOCK, WORLD)
    begin, looks = _now(ON_GPU), tl.zeros([], tl.int64)
    while missing > 0:
        looks += 1
        total, missing = _look(box, inside, plane, dtype, empty, BLOCK, WORLD)
        missing = _or_give_up(missing, begin, looks, failed, report, limit, ON_GPU)
    return total


@triton.jit(do_not_specialize=["rank", "limit"])
def _sum_rows(
    rows, residual, weight, stream, normed, table, turns, failed, report, rank, eps, limit,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, MAX_ROWS: tl.constexpr, WORLD: tl.constexpr,
    TWO_SHOT: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """One program a row. All ranks run the same code, so they cannot round differently."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = rows.dtype.element_ty
    words: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    empty: tl.constexpr = -(2 ** (dtype.primitive_bitwidth - 1))
    plane: tl.constexpr = MAX_ROWS * SIZE
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    own = _box(table, rank, words) + row * SIZE + columns
    if weight is not None:
        factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    at = row.to(tl.int64) * SIZE + columns
    part = _plain(tl.load(rows + at, mask=inside, other=0.0)).to(words, bitcast=True)
    state = tl.load(turns + row)
    turn = state % TURNS
    limit = tl.where(tl.load(failed) > 0, 0, limit)
    owner = row % WORLD
    if residual is not None:
        before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    place = (turn * WORLD + rank) * plane + row * SIZE + columns
    if TWO_SHOT:
        _send(table, owner, place, part, inside)
    else:
        for step in tl.static_range(1, WORLD + 1):
            _send(table, (rank + step) % WORLD, place, part, inside)
    # Empty what the previous exchange read: from all ranks with one shot or as the row's owner, otherwise from the
    # owner.
    from_all = (state < TURNS) | (owner == rank)
    nothing = tl.full([BLOCK], empty, words)
    read = own + (turn + 2) % TURNS * (WORLD * plane)
    for source in tl.static_range(WORLD):
        tl.store(read + source * plane, nothing, mask=inside & (from_all | (owner == source)))

    box = own + turn * (WORLD * plane)
    if TWO_SHOT:
        value = tl.zeros([BLOCK], dtype)
        if owner == rank:
            total = _take_sum(box, inside, plane, failed, report, limit, dtype, empty, BLOCK, WORLD, ON_GPU)
            if residual is not None:
                total += before
            value = _plain(total.to(dtype))
            for step in tl.static_range(1, WORLD):
                _send(table, (rank + step) % WORLD, place, value.to(words, bitcast=True), inside)
        else:
            taken = _take(box + owner * plane, owner, inside, failed, report, limit, empty, ON_GPU)
            value = taken.to(dtype, bitcast=True)
    else:
        total = _take_sum(box, inside, plane, failed, report, limit, dtype, empty, BLOCK, WORLD, ON_GPU)
        if residual is not None:
            total += before
        value = _plain(total.to(dtype))
    tl.store(stream + at, value, mask=inside)
    if weight is not None:
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        tl.store(normed + at, (wide * scale * factors).to(normed.dtype.element_ty), mask=inside)
    tl.store(turns + row, (turn + 1) % TURNS + (TURNS if TWO_SHOT else 0))


@triton.jit(do_not_specialize=["rank", "limit"])
def _join_columns(
    rows, out, table, turns, failed, report, rank, limit, pieces,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, MAX_ROWS: tl.constexpr, WORLD: tl.constexpr,
    PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """One program for each piece of a row; a piece is a row of the mailboxes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = rows.dtype.element_ty
    words: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    empty: tl.constexpr = -(2 ** (dtype.primitive_bitwidth - 1))
    plane: tl.constexpr = MAX_ROWS * SIZE
    piece = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    own = _box(table, rank, words) + piece * SIZE + columns
    if PDL:
        tl.extra.cuda.gdc_wait()
    part = _plain(tl.load(rows + piece.to(tl.int64) * SIZE + columns, mask=inside, other=0.0))
    turn = tl.load(turns + piece) % TURNS
    limit = tl.where(tl.load(failed) > 0, 0, limit)
    place = (turn * WORLD + rank) * plane + piece * SIZE + columns
    for step in tl.static_range(1, WORLD + 1):
        _send(table, (rank + step) % WORLD, place, part.to(words, bitcast=True), inside)
    nothing = tl.full([BLOCK], empty, words)
    to = out + (piece // pieces).to(tl.int64) * (pieces * WORLD * SIZE) + piece % pieces * SIZE + columns
    box = own + turn * (WORLD * plane)
    read = own + (turn + 2) % TURNS * (WORLD * plane)
    for source in tl.static_range(WORLD):
        tl.store(read + source * plane, nothing, mask=inside)
        taken = _take(box + source * plane, source, inside, failed, report, limit, empty, ON_GPU)
        tl.store(to + source * pieces * SIZE, taken.to(dtype, bitcast=True), mask=inside)
    tl.store(turns + piece, (turn + 1) % TURNS)


def sum_rows(
    boxes: Mailboxes, rows: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float,
    stream: Tensor, normed: Tensor, two_shot: bool,
) -> None:  # fmt: skip
    """Implement kernels.exchange.sum_rows_normed for at most `max_rows` rows, writing to `stream` and `normed`."""
    block = power_of_two(boxes.width)
    _sum_rows[(rows.shape[0],)](
        rows, residual, weight, stream, normed, boxes.table, boxes.turns, boxes.failed, boxes.report, boxes.rank,
        eps, _limit(boxes, rows), SIZE=boxes.width, BLOCK=block, MAX_ROWS=boxes.max_rows,
        WORLD=boxes.world, TWO_SHOT=two_shot, ON_GPU=rows.is_cuda, num_warps=row_warps(block), **starts_early(rows),
    )  # fmt: skip


def join_columns(boxes: Mailboxes, rows: Tensor, out: Tensor, pieces: int) -> None:
    """Implement kernels.exchange.join_columns for at most `max_rows` pieces, writing to `out`."""
    block = power_of_two(boxes.width)
    _join_columns[(rows.shape[0] * pieces,)](
        rows, out, boxes.table, boxes.turns, boxes.failed, boxes.report, boxes.rank, _limit(boxes, rows), pieces,
        SIZE=boxes.width, BLOCK=block, MAX_ROWS=boxes.max_rows, WORLD=boxes.world,
        ON_GPU=rows.is_cuda, num_warps=row_warps(block), **starts_early(rows),
    )  # fmt: skip


def _limit(boxes: Mailboxes, rows: Tensor) -> int:
    return int(boxes.timeout_seconds * 1e9) if rows.is_cuda else int(boxes.timeout_seconds)
