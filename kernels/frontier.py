"""Bursts of draft steps on the device: choose a step's nodes, lay them out for attention, store their children."""

from __future__ import annotations

from torch import Tensor

from kernels.frontier_state import (
    HEADER_WORDS,
    MAX_ENTRIES,
    NUM_FIELDS,
    REROOT_WORDS,
    SEED_HEADER_WORDS,
    BurstRows,
    CandidatePool,
    RegionPlan,
    StepTokens,
)
from kernels.launch import backend, use_triton

MAX_WIDTH = 256


def begin_burst(header: Tensor, seeds: Tensor, pool: CandidatePool, rows: BurstRows, plan: RegionPlan) -> None:
    """Copy the seeds into the pool, and clear tree slots that are no longer live from the slot masks. One launch.

    Args:
        header: int32 [4] of step, number of seeds, floor (bits of a float32), unused.
        seeds: int32 [8, max_seeds], fields as in the pool.
        pool: its seeds are overwritten.
        rows: of the burst; slot masks of their table rows keep only bits in `live`. Padding rows have nothing live.
        plan: where slot masks lie.
    """
    if header.shape != (HEADER_WORDS,) or seeds.shape != (NUM_FIELDS, pool.max_seeds):
        raise ValueError(f"a header of {list(header.shape)} and seeds of {list(seeds.shape)} do not fit the pool")
    if not (seeds.is_contiguous() and pool.entries.is_contiguous() and plan.slot_masks.is_contiguous()):
        raise ValueError("seeds, pool and slot masks must be contiguous")
    backend(header, "frontier").begin_burst(header, seeds, pool, rows, plan)


def reroot_pool(
    header: Tensor, pool: CandidatePool, rows: BurstRows, plan: RegionPlan, reroots: Tensor, step_size: int
) -> None:
    """Give requests of a running burst new roots, and remove entries that are not below them. One launch.

    A row with a new root keeps the entries whose parent sees the root's tree slot (the root's own children included),
    and the root itself if it has not run. The new root's path score is subtracted from SCORE and BASE of these entries,
    which stay at most 0. Any row may get more tree slots, which are appended to those it has.

    Args:
        header: see begin_burst.
        pool: forced entries (with a fixed SLOT) of rows with a new root must have been run.
        rows: num_free and free are updated.
        plan: where slot masks lie.
        reroots: int32 [B, 4 + R], for each row NEW_ROOT: pool index of its new root, or -1; NEW_ROOT_SLOT: tree slot of
            a new root that has no index in this pool, NOT_HERE if nothing is below it, or -1; SHIFT: the new root's
            path score, bits of a float32; NUM_NEW_SLOTS, followed by that many tree slots. A row with -1 in both of the
            first two keeps its root.
        step_size: entries that a step adds to the pool.
    """
    if reroots.shape != (rows.table_rows.shape[0], REROOT_WORDS + rows.free.shape[1]) or not reroots.is_contiguous():
        raise ValueError(f"new roots of {list(reroots.shape)} do not fit {list(rows.free.shape)} free tree slots")
    if not (rows.free.is_contiguous() and pool.entries.is_contiguous() and plan.slot_masks.is_contiguous()):
        raise ValueError("free slots, pool and slot masks must be contiguous")
    backend(header, "frontier").reroot_pool(header, pool, rows, plan, reroots, step_size)


def add_seeds(pool: CandidatePool, seeds: Tensor) -> None:
    """Append seeds to the pool of a running burst. One launch.

    Args:
        pool: its seeds from FIRST_SEED on are overwritten.
        seeds: int32 [4 + 8 * E]: FIRST_SEED, the pool index of the first; NUM_NEW_SEEDS, at most E; two unused words;
            then the seeds' fields as in the pool, each E long. FIRST_SEED + NUM_NEW_SEEDS is at most max_seeds.
    """
    if seeds.dim() != 1 or seeds.shape[0] < SEED_HEADER_WORDS or (seeds.shape[0] - SEED_HEADER_WORDS) % NUM_FIELDS:
        raise ValueError(f"further seeds of {list(seeds.shape)} do not have {NUM_FIELDS} fields")
    if not (seeds.is_contiguous() and pool.entries.is_contiguous()):
        raise ValueError("further seeds and pool must be contiguous")
    backend(seeds, "frontier").add_seeds(pool, seeds)


def choose_entries(header: Tensor, pool: CandidatePool, rows: BurstRows, step: StepTokens, branching: int) -> None:
    """Fill `step.order` with the best M entries of the pool, the best first, ties to the lower index. One launch.

    Entries that are below the floor or used up are skipped, and so are entries that need a tree slot in a row without a
    free one. `step.order` must be all -1 on entry; `place_entries` leaves it so. The run time hardly depends on how
    many entries are skipped.

    Args:
        header: see begin_burst; only seeds and candidates of steps before the header's step are considered.
        pool: candidates of step s begin at max_seeds + s * M * branching. At most MAX_ENTRIES entries.
        branching: candidates of a node.
    """
    _check_width(step)
    fits = pool.capacity <= min(step.keys.shape[0], MAX_ENTRIES) and pool.entries.is_contiguous()
    if use_triton(header) and not fits:
        raise ValueError(
            f"a pool of {pool.capacity} entries has to be contiguous, at most {MAX_ENTRIES}, "
            f"and to fit scratch for {step.keys.shape[0]}"
        )
    backend(header, "frontier").choose_entries(header, pool, rows, step, branching)


def place_entries(pool: CandidatePool, rows: BurstRows, step: StepTokens, plan: RegionPlan) -> None:
    """Give the chosen entries tree slots and lay them out row by row, in their order within a row. One launch.

    Fills all of `step`, marks its entries as used up in the pool, records their tree slots there, stores their slot
    masks and raises the rows' next_free. An entry without a fixed slot takes the next free one of its row; once none is
    left, such entries of the row are left out. If the plan has a `lag`, an entry that needs the feature of a parent in
    the same step waits for the next step, and so do the entries below it.
    """
    _check_width(step)
    if step.mask.shape[1] != plan.slot_masks.shape[2] or not step.mask.is_contiguous():
        raise ValueError(f"a mask of {list(step.mask.shape)} does not fit regions of {list(plan.slot_masks.shape)}")
    if plan.page_tables.stride(1) != 1 or not (rows.free.is_contiguous() and plan.slot_masks.is_contiguous()):
        raise ValueError("free slots, slot masks and the rows of the page tables must be contiguous")
    backend(step.order, "frontier").place_entries(pool, rows, step, plan)


def append_candidates(
    header: Tensor, pool: CandidatePool, step: StepTokens, tokens: Tensor, scores: Tensor, results: Tensor
) -> None:
    """Add a step's candidates to the pool and the results, and increment the header's step. One launch.

    Does nothing from step S on.

    Args:
        tokens: int32 [M, k], the target's token ids of the candidates of each place; -1 for none.
        scores: float32 [M, k], their edge scores, at most 0.
        results: int32 [S, M * (2 + 2 * k)]; the row of the header's step is written: picked [M], slots [M], tokens [M,
            k], scores [M, k] (bits); -1, -1, -1 and -inf where there is nothing.
    """
    width, branching = tokens.shape
    if scores.shape != tokens.shape or width != step.order.shape[0]:
        raise ValueError(f"candidates of {list(tokens.shape)} and {list(scores.shape)} do not fit the step")
    if results.shape[1] != width * (2 + 2 * branching) or not results.is_contiguous():
        raise ValueError(f"results of {list(results.shape)} do not fit {width} nodes of {branching} candidates")
    if pool.capacity < pool.max_seeds + results.shape[0] * width * branching:
        raise ValueError(f"a pool of {pool.capacity} entries cannot hold the candidates of {results.shape[0]} steps")
    if not (tokens.is_contiguous() and scores.is_contiguous()):
        raise ValueError("candidates must be contiguous")
    backend(header, "frontier").append_candidates(header, pool, step, tokens, scores, results)


def _check_width(step: StepTokens) -> None:
    if step.order.shape[0] > MAX_WIDTH:
        raise ValueError(f"a step runs at most {MAX_WIDTH} nodes, not {step.order.shape[0]}")
