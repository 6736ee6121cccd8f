"""Sums and joins over the ranks of a tensor-parallel model, through memory that each rank's device writes directly.

Every rank owns mailboxes [3, world, rows, width], empty at first. In an exchange a rank writes its rows into the
mailboxes of the others, then waits until its own are full. There are no flags and no fences: a number is its own flag,
because the bits of -0.0 mean "empty" and are never sent (zeros are sent as +0.0).

    exchange e      writes and reads turn e % 3, and empties turn (e + 2) % 3 of its own mailboxes, read in e - 1
    exchange e + 1  another rank may be here as soon as it has this rank's rows of e; it writes turn (e + 1) % 3
    exchange e + 2  another rank is here only when it has this rank's rows of e + 1, sent after launch e had ended, so
                    the turn that is written now is empty

So with three turns no barrier is needed at the end. Each row has its own counter on the device: launches may differ in
their numbers of rows, and CUDA graphs may be replayed, as long as all ranks launch the same work in the same order.

Sums are computed in float32 in the order of ranks and rounded once, so they have the same bits on every rank and in
every run. With `two_shot` one rank sums a row and sends the sum: fewer bytes with several ranks, one more trip, the
same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.exchange_state import Mailboxes


def sum_rows(boxes: Mailboxes, rows: Tensor, residual: Tensor | None = None, two_shot: bool | None = None) -> Tensor:
    """Return the sum of all ranks' `rows`, added to `residual` if there is one.

    Args:
        boxes: of the width and dtype of the rows.
        rows: [M, width], contiguous: this rank's part. More than `max_rows` rows take several launches.
        residual: [M, width] of the rows' dtype, the same on all ranks.
        two_shot: see the module; the same on all ranks. By default chosen by `two_shot_pays`.

    Returns:
        [M, width]: the same bits on all ranks.
    """
    return sum_rows_normed(boxes, rows, residual, None, 0.0, two_shot)[0]


def sum_rows_normed(
    boxes: Mailboxes,
    rows: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    two_shot: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `sum_rows`, and its RMS norm (see `rms_norm`) with `weight` [width]. One launch.

    Returns:
        (stream, normed), [M, width] each; without a weight both are the stream.
    """
    if weight is not None and weight.shape != (boxes.width,):
        raise ValueError(f"rows of {boxes.width} with a norm's weight of {list(weight.shape)}")
    if rows.dim() != 2 or rows.shape[1] != boxes.width or rows.dtype != boxes.dtype or not rows.is_contiguous():
        raise ValueError(
            f"{rows.dtype} {list(rows.shape)} through mailboxes of {boxes.dtype} and {boxes.width} columns, contiguous"
        )
    if residual is not None and (residual.shape != rows.shape or residual.dtype != rows.dtype):
        raise ValueError(f"rows {list(rows.shape)} with a residual of {residual.dtype} {list(residual.shape)}")
    residual = None if residual is None else residual.contiguous()
    from kernels.jit import exchange as jit

    stream = torch.empty_like(rows)
    normed = stream if weight is None else torch.empty_like(rows)
    for first in range(0, rows.shape[0], boxes.max_rows):
        part = slice(first, first + boxes.max_rows)
        before = None if residual is None else residual[part]
        two = two_shot_pays(rows[part].nbytes, boxes.world) if two_shot is None else two_shot
        jit.sum_rows(boxes, rows[part], before, weight, eps, stream[part], normed[part], two)
    return stream, normed


def join_columns(boxes: Mailboxes, rows: Tensor) -> Tensor:
    """Return all ranks' `rows` side by side in the order of ranks: [M, columns] to [M, world * columns].

    `columns` must be a multiple of the mailboxes' width; a row takes columns / width rows of the mailboxes.
    """
    pieces, rest = divmod(rows.shape[-1], boxes.width)
    if rows.dim() != 2 or rest or not 0 < pieces <= boxes.max_rows or not rows.is_contiguous():
        raise ValueError(
            f"{list(rows.shape)} to be joined must be contiguous, of a multiple of {boxes.width} columns and at most"
            f" {boxes.max_rows} times that"
        )
    if rows.dtype != boxes.dtype:
        raise ValueError(f"rows of {rows.dtype} through mailboxes of {boxes.dtype}")
    from kernels.jit import exchange as jit

    out = rows.new_empty(rows.shape[0], boxes.world, rows.shape[1])
    step = boxes.max_rows // pieces
    for first in range(0, rows.shape[0], step):
        part, target = rows[first : first + step], out[first : first + step]
        jit.join_columns(boxes, part, target, pieces)
    return out.flatten(1)


def two_shot_pays(num_bytes: int, world: int) -> bool:
    """Whether two shots sum messages of `num_bytes` faster than one, over NVLink.

    One shot sends world - 1 messages, two shots 2 (world - 1) / world. On two H100, the second trip takes 2 us, enough
    to send 0.5 MiB. With two ranks both ways send equally much, and two shots were faster from 2 MiB on.
    """
    if world == 2:
        return num_bytes >= 2 << 20
    return num_bytes * (world - 1) * (world - 2) // world > 512 << 10
