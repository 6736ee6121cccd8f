"""How products whose programs keep their next steps in a ring (kernels.jit.ring_gemm) are cut, on Hopper GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.launch import ceil_div
from kernels.linear_configs import MAX_ROWS, SHARED_MARGIN, SHARED_MEMORY, even_split, tile_rows

BY_WARP_ROWS = 8
"""Most rows for which independent warps were faster: the rows of one instruction."""


@dataclass(frozen=True, slots=True)
class RingConfig:
    """One way to cut a product on a Hopper GPU, where programs keep their next steps in a ring of shared memory."""

    tile: int = 64
    """Weight rows of a tile: 64 or 128. If gated, half of them are up rows."""
    block_k: int = 128
    """Columns of a step: at most 256 bytes of a weight row, 128 if gated."""
    split_k: int = 1
    """Programs that share a tile. 0: all steps of all tiles are shared evenly by per_sm programs a processor."""
    per_sm: int = 1
    stages: int = 4
    """Steps that the ring holds."""
    warps: int = 4
    """At most four for every 64 weight rows."""
    by_warp: bool = False
    """Each warp multiplies its weight rows alone (mma.sync), 16 at a time, instead of 64 together with three others
    (wgmma): products are then interleaved with the instructions that convert the next codes. For codes only."""

    def rows(self, num_rows: int) -> int:
        """Return how many rows programs compute for `num_rows` real ones."""
        return BY_WARP_ROWS if self.by_warp and num_rows <= BY_WARP_ROWS else tile_rows(num_rows)

    def shared_bytes(self, rows: int, code_bits: int) -> int:
        """Return a program's bytes of shared memory: ring and transposed results. `rows` is what `rows()` returns."""
        return self.stages * self.block_k * (self.tile * code_bits // 8 + 2 * rows) + 4 * self.tile * rows


RING_WEIGHTS = 16_000_000
"""Fewest weights of matrices that use rings in every format."""
_MOST_WEIGHTS = 128_000_000
"""Most weights of matrices that use rings in every format; output matrices are larger."""
_MOST_LARGE_WEIGHTS = 256_000_000
_LARGE_ROWS = {16: 32, 8: 16}
"""Most rows, by bits of a weight, for which gate and up of up to _MOST_LARGE_WEIGHTS, as in half of a 70B model, use
rings if all tiles run at once. With more rows kernels.jit.gemm was as fast in fp8; groups were not tried."""
_LEAST_WEIGHTS = {16: 6_000_000, 8: 4_000_000, 4: 4_000_000}
"""Fewest weights, by bits of a weight, of smaller matrices that use rings, measured on an H200: int4 and fp8 blocks
only for up to BY_WARP_ROWS rows, gate and up only in two bytes. With 4 million two-byte weights a ring is no faster."""
_RING_ROWS = {16: 64, 8: 64, 4: 16}
"""Most rows, by bits of a weight, for which rings were faster than kernels.jit.gemm."""
_RING_ROWS_OF_GROUPS = 16
"""Most rows for which rings were faster, for weights with scales of groups of columns."""
_BUSY = 0.7
"""Least share of the programs that can run at once; with fewer programs, all steps are shared evenly instead."""
_LEAST_STEPS = 4
_LEAST_WIDE_STEPS = 16
"""Fewest steps of a program where a tile of two-byte weights is split."""
_LEAST_CODES = 2048
"""Fewest columns of codes of a program where a tile is split and a processor has one program."""
_LEAST_PROGRAMS, _MOST_CODES = 32, 4096
"""Fewest programs of a matrix of codes, and most columns of each, if less than _BUSY of the processors are used."""
_ONE_WAVE_COLUMNS = 4096
"""Most columns of gate and up in eight bits, with all tiles running at once, for which long rings of whole tiles were
faster: for more than 16 rows, and in blocks for up to BY_WARP_ROWS. With 8,192 columns they were not."""
_LONG = 1.34
"""Least ratio of columns to weight rows for which tiles of two-byte weights are split. Below it, a few programs with a
whole tile each are faster: rings of the next launch (gate and up in a model) begin on the other processors. Rounds of
one token take an H200 2.25 ms this way, and 2.35 ms with the output's tiles split in two, for the half of an 8B model
on one of two ranks; 3.88 and 3.91 ms for the whole model. For 1B they take 1.38 ms with the tiles of down split in
four, and 1.47 ms in two."""
_LONG_CODES, _LONG_CODES_OF_FEW = 12_288, 7168
"""Fewest columns for which a second program a processor outweighs its additional sums; the latter for up to 16 rows."""
_LEAST_EVEN = 8_000_000
"""Fewest codes for which even stretches by warp are faster than whole tiles, for up to BY_WARP_ROWS rows."""


def choose_ring(
    num_out: int, size: int, num_rows: int, gated: bool, processors: int, code_bits: int, grouped: bool = False
) -> RingConfig | None:
    """Return a cut for bfloat16 rows on a Hopper GPU; None if there is none, or if kernels.jit.gemm may be as fast.

    Weights of `code_bits` bits are [num_out, size], or [2 num_out, size] if gated. Cuts are the fastest within rounds
    of models of 1B to 8B and of parts of 70B (benchmarks/notes/gpu.md). Codes are converted in registers; two or more
    programs a processor hide that. For two-byte weights one ring gets all of a processor's memory.
    """
    rows, weights = tile_rows(num_rows), num_out * size * (2 if gated else 1)
    most_rows = min(_RING_ROWS.get(code_bits, 0), _RING_ROWS_OF_GROUPS if grouped else MAX_ROWS)
    least = _LEAST_WEIGHTS.get(code_bits, RING_WEIGHTS)
    per_row = code_bits == 8 and not grouped
    if code_bits < 16 and (gated or (num_rows > BY_WARP_ROWS and not per_row)):
        least = RING_WEIGHTS
    if gated and weights > _MOST_WEIGHTS:
        at_once, tiles = 2 * processors, ceil_div(num_out, 64)
        fits = weights <= _MOST_LARGE_WEIGHTS and not grouped and _BUSY * at_once <= tiles <= at_once
        most_rows = _LARGE_ROWS.get(code_bits, 0) if fits else 0
    elif weights > _MOST_WEIGHTS:
        return None
    if weights < least or rows > most_rows or size % 128:
        return None
    if code_bits == 16:
        return _choose_wide(num_out, size, gated, rows, processors)
    if gated:
        return _choose_gated(num_out, size, num_rows, processors, code_bits, grouped)
    if num_rows <= BY_WARP_ROWS:
        if weights < RING_WEIGHTS and not per_row:
            return _choose_whole(num_out, size, processors, RingConfig(64, 256, stages=8, by_warp=True))
        config = _choose_by_warp(num_out, size, processors, code_bits, grouped)
        if config is not None:
            return config
    if code_bits == 4:
        return _choose_nibbles(num_out, size, processors)
    return _choose_bytes(num_out, size, rows, processors)


def _choose_wide(num_out: int, size: int, gated: bool, rows: int, processors: int) -> RingConfig | None:
    """Return the cut of `choose_ring` for two-byte weights (benchmarks/notes/gpu.md, smaller matrices)."""
    tiles, steps = ceil_div(num_out, 64), ceil_div(size, 128)
    if gated and tiles >= processors:
        return RingConfig(128, 64, stages=6)
    if tiles > processors or (gated and tiles < _BUSY * processors):
        return None
    split = even_split(tiles, steps, processors, _LEAST_WIDE_STEPS) if size >= _LONG * num_out else 1
    config = RingConfig(split_k=split, stages=min(8, steps // split))
    if gated:
        # All tiles run at once, so the memory of a second program a processor is free for a longer ring.
        config = RingConfig(128, 64, stages=8, warps=8)
    elif size >= _LONG * num_out and tiles * split < _BUSY * processors:
        # The steps do not divide into enough programs, so share them evenly; measured only for large matrices.
        if num_out * size < RING_WEIGHTS:
            return None
        config = RingConfig(split_k=0, stages=8)
    return _fitting_ring(config, rows, code_bits=16)


def _choose_gated(
    num_out: int, size: int, num_rows: int, processors: int, code_bits: int, grouped: bool
) -> RingConfig | None:
    """Return the cut of `choose_ring` for codes of gate and up."""
    tiles = ceil_div(num_out, 64)
    # All tiles run at once, so the memory of a second program a processor is free for a longer ring.
    one_wave = _BUSY * processors <= tiles <= processors and code_bits == 8
    if num_rows <= BY_WARP_ROWS:
        if code_bits == 4:
            return RingConfig(64, 256, split_k=0, per_sm=4, stages=2, by_warp=True)
        if grouped and one_wave and size <= _ONE_WAVE_COLUMNS:
            return RingConfig(128, 128, stages=8, warps=8)
        if one_wave and size % 256 == 0 and not grouped:
            return RingConfig(128, 128, split_k=2, per_sm=2, stages=min(5, size // 256), by_warp=True)
        if grouped or tiles >= processors:
            return RingConfig(128, 128, stages=4, by_warp=True)
    if one_wave and not grouped and tile_rows(num_rows) > 16 and size <= _ONE_WAVE_COLUMNS:
        return RingConfig(128, 128, stages=5, warps=8)
    if tiles < processors:
        return None
    if code_bits == 4:
        return RingConfig(128, 256, stages=3, warps=8)
    return RingConfig(128, 128, stages=4, warps=8) if tile_rows(num_rows) <= 32 else RingConfig(128, 128, stages=3)


def _choose_nibbles(num_out: int, size: int, processors: int) -> RingConfig | None:
    """Return the cut of `choose_ring` for four-bit codes of other matrices, with four warps together."""
    if ceil_div(num_out, 64) > 2 * processors:
        return None
    # Four-bit codes are read so fast that nearly all processors must be busy.
    config = _in_parts(RingConfig(64, 256, per_sm=2, stages=6), num_out, size, 2 * processors, busy=0.9)
    return config or RingConfig(64, 256, split_k=0, per_sm=3, stages=3)


def _choose_bytes(num_out: int, size: int, rows: int, processors: int) -> RingConfig | None:
    """Return the cut of `choose_ring` for eight-bit codes of other matrices, with four warps together."""
    tiles = ceil_div(num_out, 64)
    if tiles > processors:
        return None
    long, few = _LONG_CODES_OF_FEW if rows <= 16 else _LONG_CODES, tiles < _BUSY * processors
    twice = RingConfig(per_sm=2, stages=6 if rows <= 32 else 4)
    if rows <= 16:
        twice = RingConfig(block_k=256, per_sm=2, stages=3)
    config = None
    if few and size >= long:
        config = _in_parts(twice, num_out, size, 2 * processors, most=4)
    if config is None and not (few and size >= _LONG_CODES):
        config = _choose_whole_bytes(num_out, size, rows, processors)
    if config is None and num_out * size >= RING_WEIGHTS:
        # Stretches of few steps are better not split in two.
        shared = twice if rows <= 32 or size >= 8192 else RingConfig(stages=6)
        config = _in_parts(shared, num_out, size, shared.per_sm * processors) or replace(shared, split_k=0)
    return None if config is None else _fitting_ring(config, rows, code_bits=8)


def _choose_whole_bytes(num_out: int, size: int, rows: int, processors: int) -> RingConfig | None:
    """Return the cut of `_choose_whole` for eight-bit codes, with four warps together."""
    if rows > 32:
        config = _choose_whole(num_out, size, processors, RingConfig(stages=6))
        whole = config is not None and config.split_k == 1
        return _choose_whole(num_out, size, processors, RingConfig(block_k=256)) if whole else config
    config = _choose_whole(num_out, size, processors, RingConfig(block_k=256, stages=8))
    tiles = ceil_div(num_out, 64)
    # Few programs have their processors to themselves: programs of the next launches run on others.
    if config is None or (rows <= 16 and tiles * config.split_k <= processors // 4):
        return config
    return replace(config, stages=min(config.stages, 5 if rows <= 16 or tiles >= 0.9 * processors else 4))


def _choose_whole(num_out: int, size: int, processors: int, config: RingConfig) -> RingConfig | None:
    """Return `config` cut into at most one program a processor, each with a whole tile or at least _LEAST_CODES
    columns; None if that gives too few programs for the work."""
    small, least = num_out * size < RING_WEIGHTS, _LEAST_CODES // config.block_k
    cut = _in_parts(config, num_out, size, processors, least, busy=0.0 if small else _BUSY)
    if cut is None:
        return None
    programs = ceil_div(num_out, cut.tile) * cut.split_k
    enough = programs >= _LEAST_PROGRAMS and size <= _MOST_CODES * cut.split_k
    return cut if enough or programs >= _BUSY * processors else None


def _in_parts(
    config: RingConfig,
    num_out: int,
    size: int,
    at_once: int,
    least: int = _LEAST_STEPS,
    most: int = 64,
    busy: float = _BUSY,
) -> RingConfig | None:
    """Return `config` with each tile split into as many equal parts as run at once, at most `most`, of at least `least`
    steps; None if that gives fewer programs than the share `busy` of `at_once`, or more than `at_once`."""
    tiles, steps = ceil_div(num_out, config.tile), ceil_div(size, config.block_k)
    split = even_split(tiles, steps, min(at_once, most * tiles), least)
    if not busy * at_once <= tiles * split <= at_once:
        return None
    return replace(config, split_k=split, stages=min(config.stages, steps // split))


def _fitting_ring(config: RingConfig, rows: int, code_bits: int) -> RingConfig:
    """Return `config` with its stages reduced to what a processor has shared memory for."""
    # With 64 rows two programs fit only without the margin; with one step fewer each they are slower than no ring.
    room = SHARED_MEMORY - (SHARED_MARGIN if rows <= 32 or config.per_sm == 1 else 0)
    while config.stages > 2 and config.per_sm * config.shared_bytes(rows, code_bits) > room:
        config = replace(config, stages=config.stages - 1)
    return config


def _choose_by_warp(num_out: int, size: int, processors: int, code_bits: int, grouped: bool) -> RingConfig | None:
    """Return a cut for at most BY_WARP_ROWS rows; None where independent warps were not faster."""
    tiles, at_once = ceil_div(num_out, 64), 2 * processors
    blocks, per_row = code_bits == 8 and grouped, code_bits == 8 and not grouped
    if per_row and (num_out * size < _LEAST_EVEN or (tiles >= _BUSY * processors and size < _LONG_CODES)):
        return None
    tall = RingConfig(128, 256, per_sm=2, stages=3, warps=8 if code_bits == 4 else 4, by_warp=True)
    short = RingConfig(64, 256, per_sm=2, stages=4, by_warp=True)
    # More programs a tile, or shorter ones, lose more to sums than they gain in reading.
    tried = [(tall, 8, 6), (short, 4, _LEAST_STEPS), (tall, at_once, _LEAST_STEPS)]
    if not per_row:
        tried = [(config, at_once, _LEAST_STEPS) for config in ((short,) if blocks else (tall, short))]
    for config, most, least in tried:
        cut = _in_parts(config, num_out, size, at_once, least, most, busy=0.9 if blocks else _BUSY)
        if cut is not None:
            return cut
    if blocks:
        return RingConfig(128, 128, split_k=0, per_sm=2, stages=4, warps=8, by_warp=True)
    return replace(short, split_k=0, stages=3) if num_out * size < RING_WEIGHTS else None
