"""Page table updates, moves of KV slots, and the device's clock: a round's work beside its forward."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kernels.launch import backend
from kernels.sampling_state import RoundTokens


def update_pages(page_tables: Tensor, updates: Tensor, shifts: Tensor | None = None, num_sinks: int = 0) -> None:
    """Set page_tables[row, place - shifts[row]] = page for each row of `updates`.

    Args:
        page_tables: int32 [R, P], written.
        updates: int32 [U, 3] of (row, place, page); negative rows are ignored. No two may set the same place.
        shifts: int32 [R], number of pages that each row leaves out; None for none. If a row leaves out pages, updates
            of its first `num_sinks` pages and of the pages left out are ignored.
    """
    backend(page_tables, "kv_cache").update_pages(page_tables, updates, shifts, num_sinks)


def stamp(times: Tensor, index: int) -> None:
    """Set times[index], int64 [N], to the GPU's clock in nanoseconds once all work queued before is done.

    On a CPU, and in the interpreter, use the host's clock.
    """
    if times.is_cuda:
        from kernels.jit import kv_cache as jit

        jit.stamp(times, index)
    else:
        times[index] = time.perf_counter_ns()


def compact(
    k: Tensor,
    v: Tensor,
    tokens: RoundTokens,
    page_tables: Tensor,
    accepted: Tensor,
    num_tokens: Tensor,
    page_size: int,
) -> None:
    """Move accepted node j = 0 .. num_tokens[b] - 2 of each row b to place root[b] - first[b] + 1 + j of the row.

    One launch for all layers. Nodes come after their parents, so no node moves to a higher place, and what is
    overwritten has already been moved. Nothing moves in rows that do not sample.

    Args:
        k: [L, S, KVH, D], contiguous, updated in place; `v` likewise.
        tokens: the round; token i of row b lies at logical position cached_len[b] + i - first[b].
        page_tables: int32 [R, P], rows contiguous.
        accepted: int32 [B, D_max], places of the accepted nodes in the round, parents first; rows contiguous.
        num_tokens: int32 [B], committed tokens: the accepted nodes and the bonus token; may be a column of a matrix.
        page_size: tokens in a page.
    """
    k, v = _bits(k, v)
    if accepted.stride(1) != 1 or page_tables.stride(1) != 1:
        raise ValueError("the rows of accepted and of the page tables must be contiguous")
    backend(k, "kv_cache").compact(k, v, tokens, page_tables, accepted, num_tokens, page_size)


def move(k: Tensor, v: Tensor, moves: Tensor) -> None:
    """Copy the first slot of each pair to the second, in all layers, in one launch.

    The order of the copies is undefined: no slot may be the target of two pairs, nor the source of one and the target
    of another. Moves between a tree region and contexts, which share no slot, meet this. Pairs are read on the device,
    so the launch can be captured; unused pairs of a buffer of fixed size are (-1, -1).

    Args:
        k: [L, S, KVH, D], contiguous, written in place; `v` likewise.
        moves: int32 [N, 2], contiguous: source and target slot; pairs with a negative slot are skipped.
    """
    k, v = _bits(k, v)
    if moves.dim() != 2 or moves.shape[1] != 2 or moves.dtype != torch.int32 or not moves.is_contiguous():
        raise ValueError(f"moves of {list(moves.shape)} {moves.dtype}")
    if not moves.shape[0]:
        return
    backend(k, "kv_cache").move(k, v, moves)


def _bits(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """View eight-bit caches as bytes for copying: torch cannot index eight-bit floats. Raises ValueError."""
    if k.shape != v.shape or k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError("k and v must be contiguous and alike")
    return (k.view(torch.uint8), v.view(torch.uint8)) if k.element_size() == 1 else (k, v)
