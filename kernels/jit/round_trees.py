"""Triton kernels of kernels.round_trees."""

from __future__ import annotations

import struct

import triton
import triton.language as tl
from torch import Tensor

from kernels import frontier_state as state
from kernels.frontier_state import BurstRows, CandidatePool, CommittedTokens, GrownTrees, MergeLimits
from kernels.jit.frontier import BASE, FEATURE, FLOOR, NEVER, NUM_SEEDS, PARENT, POSITION, ROW, SCORE, SLOT, STEP, TOKEN
from kernels.launch import power_of_two
from kernels.sampling_state import RoundTokens


@triton.jit(do_not_specialize=["num_slots", "num_rows", "lag", "spare"])
def _lay_out_committed(
    positions, root, table_rows, num_tokens, committed, drafts, page_tables, shifts,
    out_tokens, out_positions, out_rotary, out_parents, out_rows, out_first, out_root, out_tables, out_cached,
    out_context, out_sources, out_draft_rows, out_root_positions,
    num_slots, num_rows, num_stride, committed_stride, table_stride, lag, spare,
    LANES: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One program. Lanes are first slots, then rows."""
    slot = tl.arange(0, LANES)
    inside = slot < num_slots
    zero = tl.zeros([LANES], tl.int32)
    tl.store(out_tokens + slot, zero, mask=inside)
    tl.store(out_positions + slot, zero, mask=inside)
    tl.store(out_rotary + slot, zero, mask=inside)
    tl.store(out_parents + slot, zero - 1, mask=inside)
    tl.store(out_rows + slot, zero - 1, mask=inside)
    tl.store(out_sources + slot, zero + spare, mask=inside)
    # Other threads write slots with a token again.
    tl.debug_barrier()

    row = tl.arange(0, LANES)
    real = row < num_rows
    table_row = tl.load(table_rows + row, mask=real, other=0)
    root_place = tl.load(root + row, mask=real, other=-1)
    wanted = real & (root_place >= 0) & (tl.load(drafts + row, mask=real, other=0) != 0)
    count = tl.load(num_tokens + row * num_stride, mask=wanted, other=0)
    has = count > 0
    begin = tl.load(positions + root_place, mask=has, other=-1) + 1
    gap = tl.load(shifts + table_row, mask=has, other=0) * PAGE
    end = tl.cumsum(count, 0)
    first = end - count
    for index in range(0, tl.max(count, 0)):
        there = index < count
        place = first + index
        position = begin + index
        token = tl.load(committed + row * committed_stride + index, mask=there, other=0)
        page = tl.load(
            page_tables + table_row.to(tl.int64) * table_stride + (position - 1 - gap) // PAGE, mask=there, other=0
        )
        tl.store(out_tokens + place, token, mask=there)
        tl.store(out_positions + place, position - lag - gap, mask=there)
        tl.store(out_rotary + place, position - lag, mask=there)
        tl.store(out_parents + place, tl.where(index > 0, place - 1, -1), mask=there)
        tl.store(out_rows + place, row, mask=there)
        tl.store(out_sources + place, page * PAGE + (position - 1) % PAGE, mask=there)
    tl.store(out_first + row, first, mask=real)
    tl.store(out_first + num_rows, tl.sum(count, 0))
    tl.store(out_root + row, tl.where(has, end - 1, 0), mask=real)
    tl.store(out_tables + row, table_row, mask=real)
    tl.store(out_cached + row, tl.where(has, begin - lag - gap, 0), mask=real)
    tl.store(out_context + row, tl.where(has, begin + count - lag - gap, 0), mask=real)
    tl.store(out_draft_rows + row, tl.where(has, table_row, -1), mask=real)
    tl.store(out_root_positions + row, tl.where(has, begin + count - 1, 0), mask=real)


@triton.jit(do_not_specialize=["floor_bits", "num_rows", "lag"])
def _plant_roots(
    header, entries, row_tables, context_len, num_free, next_free, at_tables, at_context, draft_rows, root_positions,
    tokens, scores, floor_bits, num_rows, lag,
    CAPACITY: tl.constexpr, SEEDS: tl.constexpr, BRANCHING: tl.constexpr, REGION: tl.constexpr,
    BLOCK: tl.constexpr, ROWS_PAD: tl.constexpr,
):  # fmt: skip
    """One program for each block of seeds; the first one also writes header and rows."""
    program = tl.program_id(0)
    index = program * BLOCK + tl.arange(0, BLOCK)
    inside = index < SEEDS
    of_row = index // BRANCHING
    drafted = tl.load(draft_rows + of_row, mask=inside, other=-1) >= 0
    position = tl.load(root_positions + of_row, mask=inside, other=0) + 1
    token = tl.load(tokens + index, mask=inside, other=-1)
    edge = tl.load(scores + index, mask=inside, other=NEVER)
    edge = tl.where(drafted & (token >= 0) & (edge <= 0), edge, NEVER)
    bits = edge.to(tl.int32, bitcast=True)
    none = tl.full([BLOCK], -1, tl.int32)
    tl.store(entries + ROW * CAPACITY + index, of_row, mask=inside)
    tl.store(entries + PARENT * CAPACITY + index, none, mask=inside)
    tl.store(entries + TOKEN * CAPACITY + index, token, mask=inside)
    tl.store(entries + POSITION * CAPACITY + index, position, mask=inside)
    tl.store(entries + SLOT * CAPACITY + index, none, mask=inside)
    tl.store(entries + FEATURE * CAPACITY + index, tl.where(lag > 0, of_row, -1), mask=inside)
    tl.store(entries + SCORE * CAPACITY + index, bits, mask=inside)
    tl.store(entries + BASE * CAPACITY + index, bits, mask=inside)
    if program == 0:
        row = tl.arange(0, ROWS_PAD)
        real = row < num_rows
        has = tl.load(draft_rows + row, mask=real, other=-1) >= 0
        tl.store(row_tables + row, tl.load(at_tables + row, mask=real, other=0), mask=real)
        tl.store(context_len + row, tl.load(at_context + row, mask=real, other=0), mask=real)
        tl.store(num_free + row, tl.where(has, REGION, 0), mask=real)
        tl.store(next_free + row, 0, mask=real)
        tl.store(header + STEP, 0)
        tl.store(header + NUM_SEEDS, SEEDS)
        tl.store(header + FLOOR, floor_bits)
        tl.store(header + 3, 0)


@triton.jit(do_not_specialize=["step_size", "max_seeds", "capacity"])
def _reopen_pool(header, entries, step_size, max_seeds, capacity, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < capacity
    grown = index < max_seeds + tl.load(header + STEP) * step_size
    path = tl.load(entries + BASE * capacity + index, mask=inside & grown, other=0)
    never = tl.full([BLOCK], NEVER, tl.float32).to(tl.int32, bitcast=True)
    tl.store(entries + SCORE * capacity + index, tl.where(grown, path, never), mask=inside)


@triton.jit(do_not_specialize=["capacity", "width"])
def _export_nodes(
    entries, tables, order, out_order, out_entries, capacity, width,
    OUT: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program."""
    number = tl.arange(0, BLOCK)
    entry = tl.load(order + number, mask=number < width, other=-1)
    chosen = entry >= 0
    for field in tl.static_range(FIELDS):
        value = tl.load(entries + field * capacity + entry, mask=chosen, other=0)
        if field == ROW:
            value = tl.load(tables + value, mask=chosen, other=0)
        tl.store(out_entries + field * OUT + number, value, mask=chosen)
    tl.store(out_order + number, tl.where(chosen, number, -1), mask=number < OUT)
    tl.store(order + number, -1, mask=number < width)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_nodes"])
def _merge_trees(
    tokens, positions, parents, rows, first, root, table_rows, order, entries, row_of, max_nodes,
    max_depth, most, out_tokens, out_positions, out_parents, out_rows, out_first, out_root, out_tables, out_scores,
    num_slots, num_rows, num_nodes,
    CAPACITY: tl.constexpr, NODES_PAD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program. Lanes are the chosen nodes, the best first; then the base's tokens; then rows."""
    number = tl.arange(0, NODES_PAD)
    entry = tl.load(order + number, mask=number < tl.minimum(num_nodes, tl.load(most)), other=-1)
    chosen = entry >= 0
    table = tl.load(entries + ROW * CAPACITY + entry, mask=chosen, other=-1)
    parent = tl.load(entries + PARENT * CAPACITY + entry, mask=chosen, other=-1)
    slot = tl.load(entries + SLOT * CAPACITY + entry, mask=chosen, other=-1)
    token = tl.load(entries + TOKEN * CAPACITY + entry, mask=chosen, other=0)
    position = tl.load(entries + POSITION * CAPACITY + entry, mask=chosen, other=0)
    path = tl.load(entries + BASE * CAPACITY + entry, mask=chosen, other=0).to(tl.float32, bitcast=True)
    of_row = tl.load(row_of + table, mask=chosen, other=-1)
    root_place = tl.load(root + of_row, mask=of_row >= 0, other=-1)
    near = root_place >= 0
    depth = position - tl.load(positions + root_place, mask=near, other=0)
    near = near & (depth <= tl.load(max_depth + of_row, mask=near, other=0))
    same = (of_row[:, None] == of_row[None, :]) & near[:, None] & near[None, :]
    above = same & (parent[:, None] == slot[None, :]) & (parent >= 0)[:, None]

    lane = tl.arange(0, LANES)
    inside = lane < num_slots
    base_row = tl.load(rows + lane, mask=inside, other=-1)
    used = base_row >= 0
    base_token = tl.load(tokens + lane, mask=used, other=0)
    base_position = tl.load(positions + lane, mask=used, other=0)
    base_parent = tl.load(parents + lane, mask=used, other=-1)
    base_root = tl.load(root + base_row, mask=used, other=-1)
    below = used & (base_root >= 0) & (lane > base_root)
    base_depth = base_position - tl.load(positions + base_root, mask=below, other=0)
    # The place of the base's own node that equals a grown one, level by level; no iterations without such nodes.
    twin = tl.full([NODES_PAD], -1, tl.int32)
    for _ in range(0, tl.max(tl.where(below, base_depth, 0), 0)):
        upper = tl.where(parent >= 0, tl.max(tl.where(above, twin[None, :], -1), 1), root_place)
        equal = (base_parent[None, :] == upper[:, None]) & (base_token[None, :] == token[:, None])
        twin = tl.max(tl.where(equal & (near & (upper >= 0))[:, None], lane[None, :], -1), 1)
    fresh = near & (twin < 0)
    rank = tl.sum((same & fresh[None, :] & (number[None, :] < number[:, None])).to(tl.int32), 1)
    kept = fresh & (rank < tl.load(max_nodes + of_row, mask=near, other=0))
    parent_rank = tl.max(tl.where(above, rank[None, :], -1), 1)
    parent_twin = tl.max(tl.where(above, twin[None, :], -1), 1)

    row = tl.arange(0, LANES)
    real = row < num_rows
    count = tl.sum(((of_row[None, :] == row[:, None]) & kept[None, :]).to(tl.int32), 1)
    old_first = tl.load(first + row, mask=real, other=0)
    moved = tl.cumsum(count, 0) - count
    old_root = tl.load(root + row, mask=real, other=-1)
    tl.store(out_first + row, old_first + moved, mask=real)
    tl.store(out_first + num_rows, tl.load(first + num_rows) + tl.sum(count, 0))
    tl.store(out_root + row, tl.where(old_root >= 0, old_root + moved, -1), mask=real)
    tl.store(out_tables + row, tl.load(table_rows + row, mask=real, other=0), mask=real)
    zero = tl.zeros([LANES], tl.int32)
    tl.store(out_tokens + lane, zero, mask=inside)
    tl.store(out_positions + lane, zero, mask=inside)
    tl.store(out_parents + lane, zero - 1, mask=inside)
    tl.store(out_rows + lane, zero - 1, mask=inside)
    tl.store(out_scores + lane, zero.to(tl.float32) + 1, mask=inside)
    # Other threads read where rows begin, and write slots with a token again.
    tl.debug_barrier()

    shift = tl.load(out_first + base_row, mask=used, other=0) - tl.load(first + base_row, mask=used, other=0)
    place = lane + shift
    tl.store(out_tokens + place, base_token, mask=used)
    tl.store(out_positions + place, base_position, mask=used)
    tl.store(out_parents + place, tl.where(base_parent >= 0, base_parent + shift, -1), mask=used)
    tl.store(out_rows + place, base_row, mask=used)

    own_first = tl.load(first + of_row, mask=near, other=0)
    own_shift = tl.load(out_first + of_row, mask=near, other=0) - own_first
    behind = own_shift + tl.load(first + of_row + 1, mask=near, other=0)
    node = behind + rank
    fits = kept & (node < num_slots)
    hung = tl.where(parent_rank >= 0, behind + parent_rank, own_shift + root_place)
    tl.store(out_tokens + node, token, mask=fits)
    tl.store(out_positions + node, position, mask=fits)
    tl.store(out_parents + node, tl.where(parent_twin >= 0, own_shift + parent_twin, hung), mask=fits)
    tl.store(out_rows + node, of_row, mask=fits)
    tl.store(out_scores + node, path, mask=fits)
    tl.store(out_scores + own_shift + twin, path, mask=twin >= 0)


_LEAST_LANES = 32
"""Rounds of fewer tokens and rows share a kernel, since each number of lanes is another kernel to compile."""


def _lanes(*sizes: int) -> int:
    """Return the lanes of a program that handles sets of these sizes one after the other."""
    return max(power_of_two(max(sizes)), _LEAST_LANES)


def lay_out_committed(
    tokens: RoundTokens, num_tokens: Tensor, committed: Tensor, drafts: Tensor, page_tables: Tensor, shifts: Tensor,
    out: CommittedTokens, page_size: int, lag: int, spare: int,
) -> None:  # fmt: skip
    """Implement kernels.round_trees.lay_out_committed."""
    slots, rows = out.token_ids.shape[0], out.table_rows.shape[0]
    _lay_out_committed[(1,)](
        tokens.positions, tokens.root, tokens.table_rows, num_tokens, committed, drafts, page_tables, shifts,
        out.token_ids, out.positions, out.rotary, out.parents, out.rows, out.first, out.root, out.table_rows,
        out.cached_len, out.context_len, out.sources, out.draft_rows, out.root_positions,
        slots, rows, num_tokens.stride(0), committed.stride(0), page_tables.stride(0), lag, spare,
        LANES=_lanes(slots, rows), PAGE=page_size, num_warps=4,
    )  # fmt: skip


def plant_roots(
    header: Tensor, pool: CandidatePool, rows: BurstRows, at: CommittedTokens, tokens: Tensor, scores: Tensor,
    floor: float, lag: int,
) -> None:  # fmt: skip
    """Implement kernels.round_trees.plant_roots."""
    num_rows, branching = tokens.shape
    block = min(power_of_two(pool.max_seeds), 256)
    (floor_bits,) = struct.unpack("<i", struct.pack("<f", floor))
    _plant_roots[(triton.cdiv(pool.max_seeds, block),)](
        header, pool.entries, rows.table_rows, rows.context_len, rows.num_free, rows.next_free,
        at.table_rows, at.context_len, at.draft_rows, at.root_positions, tokens, scores, floor_bits, num_rows, lag,
        CAPACITY=pool.capacity, SEEDS=pool.max_seeds, BRANCHING=branching, REGION=rows.free.shape[1],
        BLOCK=block, ROWS_PAD=power_of_two(num_rows), num_warps=4,
    )  # fmt: skip


def reopen_pool(header: Tensor, pool: CandidatePool, step_size: int) -> None:
    """Do the same as kernels.reference.round_trees.reopen_pool."""
    _reopen_pool[(triton.cdiv(pool.capacity, 1024),)](
        header, pool.entries, step_size, pool.max_seeds, pool.capacity, BLOCK=1024, num_warps=4
    )


def export_nodes(pool: CandidatePool, tables: Tensor, order: Tensor, trees: GrownTrees) -> None:
    """Do the same as kernels.reference.round_trees.export_nodes."""
    width, out = order.shape[0], trees.order.shape[0]
    _export_nodes[(1,)](
        pool.entries, tables, order, trees.order, trees.pool.entries, pool.capacity, width,
        OUT=trees.pool.capacity, BLOCK=power_of_two(max(width, out)), FIELDS=state.NUM_FIELDS, num_warps=4,
    )  # fmt: skip


def merge_trees(base: RoundTokens, trees: GrownTrees, limits: MergeLimits, out: RoundTokens, scores: Tensor) -> None:
    """Implement kernels.round_trees.merge_trees."""
    slots, rows, nodes = base.token_ids.shape[0], base.table_rows.shape[0], trees.order.shape[0]
    _merge_trees[(1,)](
        base.token_ids, base.positions, base.parents, base.rows, base.first, base.root, base.table_rows,
        trees.order, trees.pool.entries, limits.row_of, limits.max_nodes, limits.max_depth,
        limits.most, out.token_ids, out.positions, out.parents, out.rows, out.first, out.root, out.table_rows, scores,
        slots, rows, nodes,
        CAPACITY=trees.pool.capacity, NODES_PAD=_lanes(nodes), LANES=_lanes(slots, rows),
        num_warps=8 if slots > 64 else 4,
    )  # fmt: skip
