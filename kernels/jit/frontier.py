"""Triton kernels of kernels.frontier."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import frontier_state as state
from kernels.frontier_state import BurstRows, CandidatePool, RegionPlan, StepTokens
from kernels.jit.filters import order_key
from kernels.launch import power_of_two

ROW: tl.constexpr = tl.constexpr(state.ROW)
PARENT: tl.constexpr = tl.constexpr(state.PARENT)
TOKEN: tl.constexpr = tl.constexpr(state.TOKEN)
POSITION: tl.constexpr = tl.constexpr(state.POSITION)
SLOT: tl.constexpr = tl.constexpr(state.SLOT)
FEATURE: tl.constexpr = tl.constexpr(state.FEATURE)
SCORE: tl.constexpr = tl.constexpr(state.SCORE)
BASE: tl.constexpr = tl.constexpr(state.BASE)
STEP: tl.constexpr = tl.constexpr(state.STEP)
NUM_SEEDS: tl.constexpr = tl.constexpr(state.NUM_SEEDS)
_NUM_FIELDS: tl.constexpr = tl.constexpr(state.NUM_FIELDS)
_NEW_ROOT: tl.constexpr = tl.constexpr(state.NEW_ROOT)
_NEW_ROOT_SLOT: tl.constexpr = tl.constexpr(state.NEW_ROOT_SLOT)
_SHIFT: tl.constexpr = tl.constexpr(state.SHIFT)
_NUM_NEW_SLOTS: tl.constexpr = tl.constexpr(state.NUM_NEW_SLOTS)
_REROOT_WORDS: tl.constexpr = tl.constexpr(state.REROOT_WORDS)
_FIRST_SEED: tl.constexpr = tl.constexpr(state.FIRST_SEED)
_NUM_NEW_SEEDS: tl.constexpr = tl.constexpr(state.NUM_NEW_SEEDS)
_SEED_HEADER_WORDS: tl.constexpr = tl.constexpr(state.SEED_HEADER_WORDS)
NEVER: tl.constexpr = tl.constexpr(float("-inf"))
FLOOR: tl.constexpr = tl.constexpr(state.FLOOR)
_FAR: tl.constexpr = tl.constexpr(1 << 20)

# A key is the score's order, and in its low bits the entry's distance from the last possible index of a pool.
_INDEX_BITS: tl.constexpr = tl.constexpr(state.MAX_ENTRIES.bit_length() - 1)
_LAST_INDEX: tl.constexpr = tl.constexpr(state.MAX_ENTRIES - 1)
_NO_KEY: tl.constexpr = tl.constexpr(-(1 << 62))

# A tally counts listed entries in its low 32 bits, and programs that have ended above them.
_LISTED_BITS: tl.constexpr = tl.constexpr(32)
_LISTED: tl.constexpr = tl.constexpr((1 << 32) - 1)

# Bins to count keys in. Those of the first pass cover 8 powers of two from the floor; the widest cover all keys.
_BIN_BITS: tl.constexpr = tl.constexpr(8)
_BINS: tl.constexpr = tl.constexpr(256)
_FIRST_SHIFT: tl.constexpr = tl.constexpr(state.MAX_ENTRIES.bit_length() - 1 + 23 + 3 - 8)
_WIDEST_SHIFT: tl.constexpr = tl.constexpr(state.MAX_ENTRIES.bit_length() - 1 + 32 - 8)

# Entries of a program, one a thread. For the last program: listed keys that it reads at a time, keys that it ranks at a
# time, and keys that it compares them with at a time, as placing does with chosen entries.
_BLOCK = 256
_TILE = 1024
_OWN = 256
_OTHERS = 32

# Entries that a program handles when it copies seeds or re-roots the pool.
_SEEDS = 256


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_seed_programs"])
def _begin(
    header, seeds, entries, table_rows, live, slot_masks, num_seed_programs,
    MAX_SEEDS: tl.constexpr, CAPACITY: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, MASK_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: programs of seeds, then a program for each row. SIZE = region * WORDS."""
    program = tl.program_id(0)
    if program < num_seed_programs:
        index = program * BLOCK + tl.arange(0, BLOCK)
        inside = index < MAX_SEEDS
        used = index < tl.load(header + NUM_SEEDS)
        for field in tl.static_range(_NUM_FIELDS):
            value = tl.load(seeds + field * MAX_SEEDS + index, mask=inside & used, other=0)
            tl.store(entries + field * CAPACITY + index, value, mask=inside & used)
        never = tl.full([BLOCK], NEVER, tl.float32).to(tl.int32, bitcast=True)
        tl.store(entries + SCORE * CAPACITY + index, never, mask=inside & (index >= tl.load(header + NUM_SEEDS)))
    else:
        row = program - num_seed_programs
        masks = slot_masks + tl.load(table_rows + row).to(tl.int64) * SIZE
        for start in tl.static_range(0, SIZE, MASK_BLOCK):
            at = start + tl.arange(0, MASK_BLOCK)
            within = at < SIZE
            alive = tl.load(live + row * WORDS + at % WORDS, mask=within, other=0)
            tl.store(masks + at, tl.load(masks + at, mask=within, other=0) & alive, mask=within)


@triton.jit(do_not_specialize=["num_entry_programs", "step_size"])
def _reroot(
    header, entries, table_rows, num_free, free, slot_masks, reroots, num_entry_programs, step_size,
    MAX_SEEDS: tl.constexpr, CAPACITY: tl.constexpr, REGION: tl.constexpr, REGION_PAD: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: programs of entries, then for each row a program that adds its new tree slots."""
    program = tl.program_id(0)
    LINE: tl.constexpr = _REROOT_WORDS + REGION
    if program < num_entry_programs:
        index = program * BLOCK + tl.arange(0, BLOCK)
        inside = index < tl.minimum(MAX_SEEDS + tl.load(header + STEP) * step_size, CAPACITY)
        score = _as_float(tl.load(entries + SCORE * CAPACITY + index, mask=inside, other=0))
        there = inside & (score != NEVER)
        row = tl.load(entries + ROW * CAPACITY + index, mask=there, other=0)
        root = tl.load(reroots + row * LINE + _NEW_ROOT, mask=there, other=-1)
        slot = tl.load(reroots + row * LINE + _NEW_ROOT_SLOT, mask=there, other=-1)
        asked = there & ((root >= 0) | (slot != -1))
        # Another program may have updated the root's score by now, but not whether it is -inf.
        in_pool = asked & (root >= 0)
        ran = in_pool & (_as_float(tl.load(entries + SCORE * CAPACITY + root, mask=in_pool, other=0)) == NEVER)
        slot = tl.where(in_pool, tl.load(entries + SLOT * CAPACITY + root, mask=ran, other=-1), slot)
        parent = tl.load(entries + PARENT * CAPACITY + index, mask=asked, other=-1)
        table_row = tl.load(table_rows + row, mask=asked, other=0).to(tl.int64)
        may_see = asked & (slot >= 0) & (parent >= 0)
        seen = tl.load(slot_masks + (table_row * REGION + parent) * WORDS + (slot >> 5), mask=may_see, other=0)
        alive = (may_see & (((seen >> (slot & 31)) & 1) == 1)) | (index == root)
        shift = _as_float(tl.load(reroots + row * LINE + _SHIFT, mask=asked, other=0))
        base = _as_float(tl.load(entries + BASE * CAPACITY + index, mask=asked, other=0))
        score = tl.where(alive, tl.minimum(score - shift, 0.0), NEVER)
        base = tl.minimum(base - shift, 0.0)
        tl.store(entries + SCORE * CAPACITY + index, score.to(tl.int32, bitcast=True), mask=asked)
        tl.store(entries + BASE * CAPACITY + index, base.to(tl.int32, bitcast=True), mask=asked & alive)
    else:
        # Separate names: in the branch above, the same names stand for blocks.
        lone_row = program - num_entry_programs
        line = reroots + lone_row * LINE
        count, start = tl.load(line + _NUM_NEW_SLOTS), tl.load(num_free + lone_row)
        number = tl.arange(0, REGION_PAD)
        more = number < count
        spare = tl.load(line + _REROOT_WORDS + number, mask=more, other=0)
        tl.store(free + lone_row * REGION + (start + number) % REGION, spare, mask=more)
        # Other threads may not have read `num_free` yet.
        tl.debug_barrier()
        tl.store(num_free + lone_row, start + count)


@triton.jit
def _add(entries, seeds, CAPACITY: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program, for at most SIZE seeds."""
    first, count = tl.load(seeds + _FIRST_SEED), tl.load(seeds + _NUM_NEW_SEEDS)
    index = tl.arange(0, BLOCK)
    used = index < tl.minimum(count, SIZE)
    for field in tl.static_range(_NUM_FIELDS):
        value = tl.load(seeds + _SEED_HEADER_WORDS + field * SIZE + index, mask=used, other=0)
        tl.store(entries + field * CAPACITY + first + index, value, mask=used)


@triton.jit
def _earlier_links(
    order, entries, row, parent,
    CAPACITY: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return for each chosen entry the earlier one in its parent's tree slot; -1 for none."""
    number = tl.arange(0, WIDTH_PAD)
    up = tl.full([WIDTH_PAD], -1, tl.int32)
    for start in range(0, WIDTH, TILE):
        other = start + tl.arange(0, TILE)
        entry = tl.load(order + other, mask=other < WIDTH, other=-1)
        other_row = tl.load(entries + ROW * CAPACITY + entry, mask=entry >= 0, other=-1)
        slot = tl.load(entries + SLOT * CAPACITY + entry, mask=entry >= 0, other=-1)
        match = (row[:, None] == other_row[None, :]) & (parent[:, None] == slot[None, :]) & (parent >= 0)[:, None]
        match = match & (other[None, :] < number[:, None])
        up = tl.maximum(up, tl.max(tl.where(match, other[None, :], -1), 1))
    return up


@triton.jit
def _climb(links, there, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, WORDS_PAD: tl.constexpr):
    """Go from each entry up through its ancestors of this step.

    `links` holds for each entry the number of the next one above or -1, its fixed tree slot or -1, and its parent, or
    -2 if it has to wait. Returns the tree slots on the way as bits, the parent of the topmost entry, and whether any
    entry waits.
    """
    ancestor = tl.where(there, tl.arange(0, WIDTH_PAD), -1)
    word = tl.arange(0, WORDS_PAD)
    words = tl.zeros([WIDTH_PAD, WORDS_PAD], tl.int32)
    top = tl.full([WIDTH_PAD], -1, tl.int32)
    late = tl.zeros([WIDTH_PAD], tl.int32)
    while tl.max(ancestor, 0) >= 0:
        alive = ancestor >= 0
        up = tl.load(links + ancestor, mask=alive, other=-1)
        slot = tl.load(links + WIDTH + ancestor, mask=alive, other=-1)
        parent = tl.load(links + 2 * WIDTH + ancestor, mask=alive, other=-1)
        late = late | (parent < -1).to(tl.int32)
        top = tl.where(alive & (up < 0), parent, top)
        bit = tl.where(slot >= 0, 1 << (slot & 31), 0)
        words |= tl.where((slot >> 5)[:, None] == word[None, :], bit[:, None], 0)
        ancestor = up
    return words, top, late != 0


@triton.jit(do_not_specialize=["num_rows", "lag"])
def _place(
    entries, table_rows, next_free, num_free, free, page_tables, slot_masks, order, links,
    out_tokens, out_rotary, out_rows, out_table_rows, out_first, out_kv_slots, out_mask, out_picked, out_slots,
    out_positions, out_bases, out_sources, out_targets,
    num_rows, table_stride, region_base, lag,
    CAPACITY: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ROWS_PAD: tl.constexpr,
    TABLES: tl.constexpr, REGION: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program. Lanes hold the chosen entries, the best first, until they are stored at their places.

    They are compared with TILE others at a time, which memory holds, because registers do not hold all comparisons.
    """
    number = tl.arange(0, WIDTH_PAD)
    entry = tl.load(order + number, mask=number < WIDTH, other=-1)
    chosen = entry >= 0
    row = tl.load(entries + ROW * CAPACITY + entry, mask=chosen, other=_FAR)
    parent = tl.load(entries + PARENT * CAPACITY + entry, mask=chosen, other=-1)
    token = tl.load(entries + TOKEN * CAPACITY + entry, mask=chosen, other=0)
    position = tl.load(entries + POSITION * CAPACITY + entry, mask=chosen, other=0)
    fixed = tl.load(entries + SLOT * CAPACITY + entry, mask=chosen, other=-1)
    feature = tl.load(entries + FEATURE * CAPACITY + entry, mask=chosen, other=-1)
    base = _as_float(tl.load(entries + BASE * CAPACITY + entry, mask=chosen, other=0))
    table_row = tl.load(table_rows + row, mask=chosen, other=TABLES - 1)
    taken = tl.load(next_free + row, mask=chosen, other=0)
    there_are = tl.load(num_free + row, mask=chosen, other=0)

    up = _earlier_links(order, entries, row, parent, CAPACITY, WIDTH, WIDTH_PAD, TILE)
    waits = (up >= 0) & (feature < 0) & (lag > 0)
    stored = number < WIDTH
    tl.store(links + number, up, mask=stored)
    tl.store(links + WIDTH + number, fixed, mask=stored)
    tl.store(links + 2 * WIDTH + number, tl.where(waits, -2, parent), mask=stored)
    # Other threads read what these have written, and must read below before it is overwritten.
    tl.debug_barrier()
    words, top, late = _climb(links, chosen, WIDTH, WIDTH_PAD, WORDS_PAD)
    kept = chosen & (late == 0)

    wants = kept & (fixed < 0)
    tl.debug_barrier()
    tl.store(links + number, tl.where(wants, row, -1), mask=stored)
    tl.debug_barrier()
    nth = taken
    for start in range(0, WIDTH, TILE):
        other = start + tl.arange(0, TILE)
        other_row = tl.load(links + other, mask=other < WIDTH, other=-1)
        before = (other_row[None, :] == row[:, None]) & (other[None, :] < number[:, None])
        nth += tl.sum(before.to(tl.int32), 1)
    kept = kept & ((fixed >= 0) | (nth < there_are))
    slot = tl.where(fixed >= 0, fixed, tl.load(free + row * REGION + nth % REGION, mask=wants & kept, other=0))
    word = tl.arange(0, WORDS_PAD)
    own_bit = tl.where(slot >= 0, 1 << (slot & 31), 0)
    words |= tl.where((slot >> 5)[:, None] == word[None, :], own_bit[:, None], 0)
    masks = slot_masks + (table_row.to(tl.int64) * (REGION * WORDS))[:, None] + word[None, :]
    in_words = (word < WORDS)[None, :]
    words |= tl.load(masks + (top * WORDS)[:, None], mask=(kept & (top >= 0))[:, None] & in_words, other=0)

    # Rows in order, within each row entries in order; entries that are left out come last.
    key = tl.where(kept, row, _FAR)
    tl.store(links + WIDTH + number, key, mask=stored)
    tl.debug_barrier()
    burst_row = tl.arange(0, ROWS_PAD)
    in_rows = burst_row < num_rows
    place, first = tl.zeros([WIDTH_PAD], tl.int32), tl.zeros([ROWS_PAD], tl.int32)
    new_taken = tl.load(next_free + burst_row, mask=in_rows, other=0)
    for start in range(0, WIDTH, TILE):
        other = start + tl.arange(0, TILE)
        wanting = tl.load(links + other, mask=other < WIDTH, other=-1)
        others = tl.load(links + WIDTH + other, mask=other < WIDTH, other=_FAR)
        same = (others[None, :] == key[:, None]) & (other[None, :] < number[:, None])
        place += tl.sum(((others[None, :] < key[:, None]) | same).to(tl.int32), 1)
        first += tl.sum((others[None, :] < burst_row[:, None]).to(tl.int32), 1)
        took = (others[None, :] == burst_row[:, None]) & (wanting == others)[None, :]
        new_taken += tl.sum(took.to(tl.int32), 1)
    logical = region_base + slot
    page = tl.load(page_tables + table_row.to(tl.int64) * table_stride + logical // PAGE, mask=kept, other=0)
    tl.debug_barrier()

    tl.store(out_first + burst_row, first, mask=burst_row <= num_rows)
    tl.store(next_free + burst_row, new_taken, mask=in_rows)
    tl.store(order + number, -1, mask=stored)
    tl.store(masks + (slot * WORDS)[:, None], words, mask=kept[:, None] & in_words)
    never = tl.full([WIDTH_PAD], NEVER, tl.float32)
    tl.store(entries + SCORE * CAPACITY + entry, never.to(tl.int32, bitcast=True), mask=kept)
    tl.store(entries + SLOT * CAPACITY + entry, slot, mask=kept)

    put = place < WIDTH
    tl.store(out_tokens + place, tl.where(kept, token, 0), mask=put)
    tl.store(out_rotary + place, tl.where(kept, tl.maximum(position - lag, 0), 0), mask=put)
    tl.store(out_rows + place, tl.where(kept, row, -1), mask=put)
    tl.store(out_table_rows + place, tl.where(kept, table_row, -1), mask=put)
    tl.store(out_kv_slots + place, tl.where(kept, page * PAGE + logical % PAGE, -1), mask=put)
    tl.store(out_mask + (place * WORDS)[:, None] + word[None, :], tl.where(kept[:, None], words, 0),
             mask=put[:, None] & in_words)  # fmt: skip
    tl.store(out_picked + place, tl.where(kept, entry, -1), mask=put)
    tl.store(out_slots + place, tl.where(kept, slot, -1), mask=put)
    tl.store(out_positions + place, tl.where(kept, position, 0), mask=put)
    tl.store(out_bases + place, tl.where(kept, base, NEVER), mask=put)
    zero_row = TABLES * REGION
    source = tl.where(
        feature >= 0, zero_row + 1 + feature, tl.where(parent >= 0, table_row * REGION + parent, zero_row)
    )
    tl.store(out_sources + place, tl.where(kept, source, zero_row).to(tl.int64), mask=put)
    target = tl.where(kept, table_row * REGION + slot, (TABLES - 1) * REGION)
    tl.store(out_targets + place, target.to(tl.int64), mask=put)


@triton.jit
def _append(
    header, entries, rows, picked, slots, positions, bases, tokens, scores, results, max_steps,
    MAX_SEEDS: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, BRANCHING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, which increments the step after everything is read."""
    step = tl.load(header + STEP)
    if step >= max_steps:
        return
    SIZE: tl.constexpr = WIDTH * BRANCHING
    result = results + step * (2 * WIDTH + 2 * SIZE)
    for start in tl.static_range(0, SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < SIZE
        place = index // BRANCHING
        run = tl.load(picked + place, mask=inside, other=-1)
        slot = tl.load(slots + place, mask=inside, other=-1)
        token = tl.load(tokens + index, mask=inside, other=-1)
        edge = tl.load(scores + index, mask=inside, other=0.0)
        there = (run >= 0) & (token >= 0) & (edge <= 0)
        edge = tl.where(there, edge, NEVER)
        path = tl.load(bases + place, mask=inside, other=NEVER) + edge
        bits = path.to(tl.int32, bitcast=True)
        entry = entries + MAX_SEEDS + step * SIZE + index
        tl.store(entry + ROW * CAPACITY, tl.load(rows + place, mask=inside, other=-1), mask=inside)
        tl.store(entry + PARENT * CAPACITY, slot, mask=inside)
        tl.store(entry + TOKEN * CAPACITY, token, mask=inside)
        tl.store(entry + POSITION * CAPACITY, tl.load(positions + place, mask=inside, other=0) + 1, mask=inside)
        tl.store(entry + SLOT * CAPACITY, -1, mask=inside)
        tl.store(entry + FEATURE * CAPACITY, -1, mask=inside)
        tl.store(entry + SCORE * CAPACITY, bits, mask=inside)
        tl.store(entry + BASE * CAPACITY, bits, mask=inside)
        tl.store(result + 2 * WIDTH + index, tl.where(there, token, -1), mask=inside)
        tl.store(result + 2 * WIDTH + SIZE + index, edge.to(tl.int32, bitcast=True), mask=inside)
        of_node = inside & (index % BRANCHING == 0)
        tl.store(result + place, run, mask=of_node)
        tl.store(result + WIDTH + place, slot, mask=of_node)
    tl.debug_barrier()
    tl.store(header + STEP, step + 1)


def begin_burst(header: Tensor, seeds: Tensor, pool: CandidatePool, rows: BurstRows, plan: RegionPlan) -> None:
    """Implement kernels.frontier.begin_burst."""
    region, words = plan.slot_masks.shape[1:]
    of_seeds = triton.cdiv(pool.max_seeds, _SEEDS)
    _begin[(of_seeds + rows.table_rows.shape[0],)](
        header, seeds, pool.entries, rows.table_rows, rows.live, plan.slot_masks, of_seeds,
        MAX_SEEDS=pool.max_seeds, CAPACITY=pool.capacity, SIZE=region * words, WORDS=words,
        BLOCK=_SEEDS, MASK_BLOCK=min(power_of_two(region * words), 1024), num_warps=4,
    )  # fmt: skip


def reroot_pool(
    header: Tensor, pool: CandidatePool, rows: BurstRows, plan: RegionPlan, reroots: Tensor, step_size: int
) -> None:
    """Implement kernels.frontier.reroot_pool."""
    region, words = plan.slot_masks.shape[1:]
    of_entries = triton.cdiv(pool.capacity, _SEEDS)
    _reroot[(of_entries + rows.table_rows.shape[0],)](
        header, pool.entries, rows.table_rows, rows.num_free, rows.free, plan.slot_masks, reroots,
        of_entries, step_size,
        MAX_SEEDS=pool.max_seeds, CAPACITY=pool.capacity, REGION=region, REGION_PAD=power_of_two(region), WORDS=words,
        BLOCK=_SEEDS, num_warps=4,
    )  # fmt: skip


def add_seeds(pool: CandidatePool, seeds: Tensor) -> None:
    """Implement kernels.frontier.add_seeds."""
    size = (seeds.shape[0] - state.SEED_HEADER_WORDS) // state.NUM_FIELDS
    _add[(1,)](pool.entries, seeds, CAPACITY=pool.capacity, SIZE=size, BLOCK=power_of_two(size), num_warps=4)


def place_entries(pool: CandidatePool, rows: BurstRows, step: StepTokens, plan: RegionPlan) -> None:
    """Implement kernels.frontier.place_entries."""
    width, num_rows = step.order.shape[0], rows.table_rows.shape[0]
    tables, region, words = plan.slot_masks.shape
    _place[(1,)](
        pool.entries, rows.table_rows, rows.next_free, rows.num_free, rows.free,
        plan.page_tables, plan.slot_masks, step.order, step.links,
        step.token_ids, step.rotary, step.rows, step.table_rows, step.first, step.kv_slots, step.mask, step.picked,
        step.slots, step.positions, step.bases, step.sources, step.targets,
        num_rows, plan.page_tables.stride(0), plan.region_base, plan.lag,
        CAPACITY=pool.capacity, WIDTH=width, WIDTH_PAD=power_of_two(width), ROWS_PAD=power_of_two(tables),
        TABLES=tables, REGION=region, WORDS=words, WORDS_PAD=power_of_two(words), PAGE=plan.page_size,
        TILE=min(power_of_two(width), _OTHERS), num_warps=4 if width <= 64 else 8,
    )  # fmt: skip


def append_candidates(
    header: Tensor, pool: CandidatePool, step: StepTokens, tokens: Tensor, scores: Tensor, results: Tensor
) -> None:
    """Implement kernels.frontier.append_candidates."""
    width, branching = tokens.shape
    _append[(1,)](
        header, pool.entries, step.rows, step.picked, step.slots, step.positions, step.bases,
        tokens, scores, results, results.shape[0],
        MAX_SEEDS=pool.max_seeds, CAPACITY=pool.capacity, WIDTH=width, BRANCHING=branching,
        BLOCK=min(power_of_two(width * branching), 512), num_warps=4,
    )  # fmt: skip


# The choice. Most of a pool's entries were run already or may not be run: of 17,000 a few hundred to 3,000 are
# candidates. So the programs of the launch list the candidates, and the last program to end ranks the best of the list,
# when no other program is running any more. The list holds a unique key for each entry, larger for better entries, so
# the order in which programs write the list does not matter.


@triton.jit
def _load_keys(keys, start, total, COUNT: tl.constexpr):
    place = start + tl.arange(0, COUNT)
    return tl.load(keys + place, mask=place < total, other=_NO_KEY)


@triton.jit
def _move_up(keys, total, border, TILE: tl.constexpr):
    """Move keys from the border on to the front of the list, and return their number."""
    kept = total - total
    for start in range(0, total, TILE):
        found = _load_keys(keys, start, total, TILE)
        near = (found >= border).to(tl.int32)
        place = kept + tl.cumsum(near, 0) - 1
        # The stores below may overwrite parts of this tile that other threads have yet to read.
        tl.debug_barrier()
        tl.store(keys + place, found, mask=near != 0)
        kept += tl.sum(near, 0)
    tl.debug_barrier()
    return kept


@triton.jit
def _shorten(keys, total, low, width, MOST: tl.constexpr, TILE: tl.constexpr):
    """Cut a list of keys, all at least `low`, to at most MOST, keeping the `width` best. Returns how many are left.

    Keys are counted in bins from `low` on; the last bin also takes all keys above it. Keys below the bin that holds the
    `width`-th best key are dropped, and that bin is divided, down to bins of one key.
    """
    shift = total - total + _FIRST_SHIFT
    while (total > MOST) & (shift >= 0):
        counts = tl.zeros([_BINS], tl.int32)
        for start in range(0, total, TILE):
            found = _load_keys(keys, start, total, TILE)
            place = tl.minimum((found - low) >> shift, _BINS - 1).to(tl.int32)
            counts += tl.histogram(place, _BINS, mask=found >= low)
        above = tl.cumsum(counts, 0, reverse=True)
        last = tl.sum((above >= width).to(tl.int32), 0) - 1
        low += last.to(tl.int64) << shift
        total = _move_up(keys, total, low, TILE)
        # The best keys may lie above the first pass's bins.
        wide = (shift == _FIRST_SHIFT) & (last == _BINS - 1)
        shift = tl.where(wide, _WIDEST_SHIFT, tl.where(shift > 0, tl.maximum(shift - _BIN_BITS, 0), -1))
    return total


@triton.jit
def _rank(keys, total, order, width, OWN: tl.constexpr, OTHERS: tl.constexpr):
    """Store the indices of the `width` best keys of a list in `order`; a key's rank is the number of keys above it."""
    for begin in range(0, total, OWN):
        own = _load_keys(keys, begin, total, OWN)
        above = tl.zeros([OWN, OTHERS], tl.int32)
        for start in range(0, total, OTHERS):
            # This has less latency than a comparison. A negative difference has all upper bits set.
            above -= ((own[:, None] - _load_keys(keys, start, total, OTHERS)[None, :]) >> 63).to(tl.int32)
        rank = tl.sum(above, 1)
        index = _LAST_INDEX - (own & _LAST_INDEX)
        tl.store(order + rank, index.to(tl.int32), mask=(own != _NO_KEY) & (rank < width))


@triton.jit(do_not_specialize=["step_size", "max_seeds", "capacity", "width"])
def _choose(
    header, entries, next_free, num_free, order, keys, tally, step_size, max_seeds, capacity, width,
    MOST: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Each program lists the candidates among BLOCK entries; the last to end cuts the list to MOST and ranks it.

    Sizes of the pool are not constexpr: there is one for each shape of a step, and of a choice.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < capacity
    # All entries are loaded at once, candidates or not: loads that depend on each other take longer.
    score = tl.load(entries + SCORE * capacity + index, mask=inside, other=0).to(tl.float32, bitcast=True)
    row = tl.load(entries + ROW * capacity + index, mask=inside, other=0)
    slot = tl.load(entries + SLOT * capacity + index, mask=inside, other=0)
    floor = tl.load(header + FLOOR).to(tl.float32, bitcast=True)
    limit = tl.minimum(max_seeds + tl.load(header + STEP) * step_size, capacity)
    usable = (index < limit) & (score >= floor) & (score > NEVER)
    free = usable & (slot < 0)
    taken = tl.load(next_free + row, mask=free, other=0)
    usable = usable & ((slot >= 0) | (taken < tl.load(num_free + row, mask=free, other=0)))

    count = tl.sum(usable.to(tl.int32), 0)
    if count > 0:
        listed = tl.atomic_add(tally, count.to(tl.int64), sem="relaxed") & _LISTED
        key = (order_key(score).to(tl.int64) << _INDEX_BITS) | (_LAST_INDEX - index)
        tl.store(keys + listed + tl.cumsum(usable.to(tl.int32), 0) - 1, key, mask=usable)
    tl.debug_barrier()
    one = tl.full([], 1, tl.int64) << _LISTED_BITS
    before = tl.atomic_add(tally, one, sem="acq_rel")
    if (before >> _LISTED_BITS) == tl.num_programs(0) - 1:
        total = (before & _LISTED).to(tl.int32)
        if total > MOST:
            lowest = order_key(floor).to(tl.int64) << _INDEX_BITS
            total = _shorten(keys, total, lowest, width, MOST, TILE)
        _rank(keys, total, order, width, OWN, OTHERS)
        tl.store(tally, 0)


def choose_entries(header: Tensor, pool: CandidatePool, rows: BurstRows, step: StepTokens, branching: int) -> None:
    """Implement kernels.frontier.choose_entries."""
    width = step.order.shape[0]
    most = max(2 * power_of_two(width), 128)
    _choose[(triton.cdiv(pool.capacity, _BLOCK),)](
        header, pool.entries, rows.next_free, rows.num_free, step.order, step.keys, step.tally, width * branching,
        pool.max_seeds, pool.capacity, width,
        MOST=most, BLOCK=_BLOCK, TILE=_TILE, OWN=min(most, _OWN), OTHERS=_OTHERS, num_warps=8,
    )  # fmt: skip
