"""See kernels.frontier.choose_entries.

Most of a pool's entries were run, or may not be: of 17,000 a few hundred to 3,000 count. So the programs of the launch
list those that do, and the last one to end ranks the best of the list, with all others out of the way by then. What
counts is known by one number, its key, which is larger the better an entry is and which no other one has; in which
order programs come to write the list does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import frontier_state as state
from kernels.attention_tiles import power_of_two
from kernels.frontier_state import BurstRows, Pool, StepTokens
from kernels.jit.filters import order_key

_ROW: tl.constexpr = tl.constexpr(state.ROW)
_SLOT: tl.constexpr = tl.constexpr(state.SLOT)
_SCORE: tl.constexpr = tl.constexpr(state.SCORE)
_STEP: tl.constexpr = tl.constexpr(state.STEP)
_FLOOR: tl.constexpr = tl.constexpr(state.FLOOR)
_NEVER: tl.constexpr = tl.constexpr(float("-inf"))

# A key is the score's order, and below it how far the entry is from the pool's last possible one.
_INDEX_BITS: tl.constexpr = tl.constexpr(state.MAX_ENTRIES.bit_length() - 1)
_LAST_INDEX: tl.constexpr = tl.constexpr(state.MAX_ENTRIES - 1)
_NO_KEY: tl.constexpr = tl.constexpr(-(1 << 62))

# A tally counts what is listed, and above these bits the programs that have ended.
_LISTED_BITS: tl.constexpr = tl.constexpr(32)
_LISTED: tl.constexpr = tl.constexpr((1 << 32) - 1)

# Bins that keys are counted in. The first ones reach from the floor over 8 powers of two; the widest take all keys.
_BIN_BITS: tl.constexpr = tl.constexpr(8)
_BINS: tl.constexpr = tl.constexpr(256)
_FIRST_SHIFT: tl.constexpr = tl.constexpr(state.MAX_ENTRIES.bit_length() - 1 + 23 + 3 - 8)
_WIDEST_SHIFT: tl.constexpr = tl.constexpr(state.MAX_ENTRIES.bit_length() - 1 + 32 - 8)

# Entries of a program, one a thread; listed keys that the last one takes at a time; keys that it ranks at a time, and
# that it compares these with.
_BLOCK = 256
_TILE = 1024
_OWN = 256
_OTHERS = 32


@triton.jit
def _load_keys(keys, start, total, COUNT: tl.constexpr):
    place = start + tl.arange(0, COUNT)
    return tl.load(keys + place, mask=place < total, other=_NO_KEY)


@triton.jit
def _move_up(keys, total, border, TILE: tl.constexpr):
    """Keys from the border on move to the front of the list. Returns how many they are."""
    kept = total - total
    for start in range(0, total, TILE):
        found = _load_keys(keys, start, total, TILE)
        near = (found >= border).to(tl.int32)
        place = kept + tl.cumsum(near, 0) - 1
        # What other threads have still to read of this tile may be written over.
        tl.debug_barrier()
        tl.store(keys + place, found, mask=near != 0)
        kept += tl.sum(near, 0)
    tl.debug_barrier()
    return kept


@triton.jit
def _shorten(keys, total, low, WIDTH: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr):
    """Cut a list down to at most MOST keys, the WIDTH best among them. All reach `low`. Returns how many are left.

    Keys are counted in bins from `low` on, the last of which takes all that lie behind it too. What is below the bin
    with the WIDTH best key goes, and that bin is divided, down to bins of one key.
    """
    shift = total - total + _FIRST_SHIFT
    while (total > MOST) & (shift >= 0):
        counts = tl.zeros([_BINS], tl.int32)
        for start in range(0, total, TILE):
            found = _load_keys(keys, start, total, TILE)
            place = tl.minimum((found - low) >> shift, _BINS - 1).to(tl.int32)
            counts += tl.histogram(place, _BINS, mask=found >= low)
        above = tl.cumsum(counts, 0, reverse=True)
        last = tl.sum((above >= WIDTH).to(tl.int32), 0) - 1
        low += last.to(tl.int64) << shift
        total = _move_up(keys, total, low, TILE)
        # As many may lie behind the first pass's bins.
        wide = (shift == _FIRST_SHIFT) & (last == _BINS - 1)
        shift = tl.where(wide, _WIDEST_SHIFT, tl.where(shift > 0, tl.maximum(shift - _BIN_BITS, 0), -1))
    return total


@triton.jit
def _rank(keys, total, order, WIDTH: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr):
    """The WIDTH best of a list: each key's rank is how many are above it."""
    for begin in range(0, total, OWN):
        own = _load_keys(keys, begin, total, OWN)
        above = tl.zeros([OWN, OTHERS], tl.int32)
        for start in range(0, total, OTHERS):
            # Less is waited for than after a comparison. A negative difference has all of the upper bits.
            above -= ((own[:, None] - _load_keys(keys, start, total, OTHERS)[None, :]) >> 63).to(tl.int32)
        rank = tl.sum(above, 1)
        index = _LAST_INDEX - (own & _LAST_INDEX)
        tl.store(order + rank, index.to(tl.int32), mask=(own != _NO_KEY) & (rank < WIDTH))


@triton.jit(do_not_specialize=["step_size"])
def _choose(
    header, entries, next_free, num_free, order, keys, tally, step_size,
    MAX_SEEDS: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Each program lists what may be run of BLOCK entries; the last one to end ranks the list, cut down to MOST."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < CAPACITY
    # All are loaded at once, whether they count or not: loads that wait for each other take longer.
    score = tl.load(entries + _SCORE * CAPACITY + index, mask=inside, other=0).to(tl.float32, bitcast=True)
    row = tl.load(entries + _ROW * CAPACITY + index, mask=inside, other=0)
    slot = tl.load(entries + _SLOT * CAPACITY + index, mask=inside, other=0)
    floor = tl.load(header + _FLOOR).to(tl.float32, bitcast=True)
    limit = tl.minimum(MAX_SEEDS + tl.load(header + _STEP) * step_size, CAPACITY)
    usable = (index < limit) & (score >= floor) & (score > _NEVER)
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
            total = _shorten(keys, total, lowest, WIDTH, MOST, TILE)
        _rank(keys, total, order, WIDTH, OWN, OTHERS)
        tl.store(tally, 0)


def choose_entries(header: Tensor, pool: Pool, rows: BurstRows, step: StepTokens, branching: int) -> None:
    """As kernels.frontier.choose_entries."""
    width = step.order.shape[0]
    most = max(2 * power_of_two(width), 128)
    _choose[(triton.cdiv(pool.capacity, _BLOCK),)](
        header, pool.entries, rows.next_free, rows.num_free, step.order, step.keys, step.tally, width * branching,
        MAX_SEEDS=pool.max_seeds, CAPACITY=pool.capacity, WIDTH=width, MOST=most,
        BLOCK=_BLOCK, TILE=_TILE, OWN=min(most, _OWN), OTHERS=_OTHERS, num_warps=8,
    )  # fmt: skip
