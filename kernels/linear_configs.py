"""How products are cut into programs, and which cut suits which shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.launch import ceil_div, power_of_two

MAX_ROWS = 64
"""Most rows of a launch."""
MAX_QUANTIZED_ROWS = 256
"""Up to this many rows it is best to read quantized weights again for every 64 rows; above, to dequantize them once and
multiply with cuBLAS. For 192 and 256 rows, all products of an 8B model take an H100 8.5 and 11.3 ms the first way and
13.8 and 14.4 ms dequantized in int4; 11.5 and 15.3, and 14.8 and 15.4, in fp8 blocks
(benchmarks/results/engine_quantized_passes_h100.json)."""
LARGE_WEIGHTS = 40_000_000
"""From this many weights on our kernel is used above 32 rows; with fewer, cuBLAS reads some weights faster at 64."""
SMALL_WEIGHTS = 1_500_000
"""Up to this many weights our kernel is faster at 64 rows too, 1.25 to 1.4 times for products of SmolLM2-135M."""
MIN_TILE = 16
SHARED_MEMORY = 227 * 1024
"""Most bytes of one program on Hopper."""
SHARED_MARGIN = 16 * 1024
"""Bytes of SHARED_MEMORY left for the barriers of the copy engine and whatever else Triton adds."""
NEXT_PROGRAMS = 24 * 1024
"""Bytes of a processor's shared memory that concurrent programs leave for programs of the next launch."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One way to cut a product. Sizes are in elements; a step is block_k columns of a tile of block_n weight rows.

    A memory-bound product needs 32 to 64 KB of weights in flight on every processor, equal work for all processors, and
    few re-reads of the rows: each tile reads all rows, M / block_n row elements per weight. split_k gives more programs
    without more re-reads.
    """

    block_n: int = 64
    """Weight rows of a tile; a gated tile has twice as many."""
    block_k: int = 128
    split_k: int = 1
    """Programs that share a tile. 0: all steps of all tiles are shared evenly by per_sm programs a processor."""
    per_sm: int = 1
    stages: int = 4
    """Steps in flight in shared memory."""
    warps: int = 4
    swap: bool = True
    """Weights are the left operand: with block_n >= 64, wgmma reads them straight from shared memory."""
    tma: bool = False
    """Load tiles with the copy engine (TMA), not with cp.async; K * itemsize must be a multiple of 16."""
    prefetch: int = 0
    """Steps that a program prefetches into L2 before it waits for the previous kernel."""
    bulk: bool = True
    """Prefetch whole pieces of a weight row with the copy engine, not line by line."""

    def shared_bytes(self, num_rows: int, itemsize: int, gated: bool, code_bits: int | None = None) -> int:
        """Return bytes of shared memory of the steps in flight.

        Triton adds a little, and up to a tile in float32 where it converts. `code_bits`: bits of a quantized weight.
        """
        weights = self.block_n * (2 if gated else 1) * (itemsize * 8 if code_bits is None else code_bits) // 8
        return self.stages * (weights + tile_rows(num_rows) * itemsize) * self.block_k


def tile_rows(num_rows: int) -> int:
    """Return how many rows programs compute for `num_rows` real ones: a power of two."""
    return max(power_of_two(num_rows), MIN_TILE)


# The fastest cuts on an H200 by (num_out, size, gated, rows of a tile), for two-byte weights
# (benchmarks/results/kernels_gemm_h200.json; for an 8B model measured among its other products,
# benchmarks/results/product_chains_h200.json). cuBLAS reads 3.07 TB/s against our 2.82 for (6144, 4096) at 64 rows, and
# 2.87 against 2.70 for (4096, 4096) there; for (6144, 4096) and the gated product at up to 32 rows the two are within
# 3 % of each other. At 64 rows, having the rows on the left was up to a tenth faster, but Triton 3.6 cannot compile
# that for every kind of output.
_TUNED: dict[tuple[int, int, bool, int], GemmConfig] = {
    (6144, 4096, False, 32): GemmConfig(64, 128, split_k=0, stages=6, prefetch=4, tma=True),
    (6144, 4096, False, 64): GemmConfig(64, 128, split_k=0, stages=6, prefetch=4),
    (4096, 4096, False, 32): GemmConfig(64, 128, stages=6, prefetch=4, tma=True),
    (4096, 4096, False, 64): GemmConfig(64, 128, split_k=2, stages=6, prefetch=4, tma=True),
    (14336, 4096, True, 32): GemmConfig(128, 64, stages=4, prefetch=4, tma=True),
    (14336, 4096, True, 64): GemmConfig(128, 64, stages=4, prefetch=2, tma=True),
    (4096, 14336, False, 32): GemmConfig(64, 128, split_k=2, stages=5, prefetch=2, tma=True),
    (4096, 14336, False, 64): GemmConfig(64, 64, split_k=2, stages=8, prefetch=2),
    (49152, 4096, False, 16): GemmConfig(64, 64, stages=8, prefetch=4, bulk=False),
    (49152, 4096, False, 32): GemmConfig(128, 64, stages=3, tma=True),
    (49152, 4096, False, 64): GemmConfig(128, 128, stages=4),
    # Queries, keys and values of SmolLM2-135M, if `norm_qkv` cannot write them: bound by latency, so narrow tiles with
    # all their steps in flight. kernels.jit.row_linear computes its other products.
    (960, 576, False, 16): GemmConfig(64, 128, stages=6, prefetch=8, bulk=False),
    (960, 576, False, 32): GemmConfig(16, 64, stages=8, warps=2, swap=False, prefetch=8, bulk=False),
    (960, 576, False, 64): GemmConfig(32, 128, stages=3, swap=False, prefetch=8, bulk=False),
}


def choose_config(num_out: int, size: int, num_rows: int, gated: bool, itemsize: int, processors: int) -> GemmConfig:
    """Return a config for weights [num_out, size] ([2 num_out, size] if gated) and M up to tile_rows(num_rows)."""
    rows = tile_rows(num_rows)
    tuned = _TUNED.get((num_out, size, gated, rows))
    if tuned is not None and itemsize == 2:
        return tuned
    if itemsize > 2:
        # float32 does not use tensor cores, so registers limit the tiles.
        config = GemmConfig(block_n=32, block_k=32, per_sm=2, stages=3, swap=False)
        return replace(config, split_k=_split(config, num_out, size, 2 * processors))
    # Like the tuned configs: one program a processor with many stages. Many tiles of few rows are best read in small
    # steps.
    many = num_out >= 64 * processors
    block_k = 64 if (many and rows <= 16) or (size % 128 and size < 2048) else 128
    config = GemmConfig(block_n=64, block_k=block_k, stages=8, prefetch=4, tma=rows >= 32)
    config = _fitting(config, rows, itemsize, gated)
    return replace(config, split_k=_split(config, num_out, size, processors))


def quantized_config(
    num_out: int, size: int, num_rows: int, gated: bool, itemsize: int, processors: int, kind: str, piece: int
) -> GemmConfig:
    """Return a config like `choose_config` for a QuantWeight of `kind` and `piece`; `itemsize` is that of the rows.

    Weights are converted in registers: several programs a processor hide that.

    If the steps divide well, all programs run at once, each with one stretch of one tile: a program that moves on to
    another tile has nothing in flight meanwhile. An 8B model's products of one row, run in the model's order, take an
    H200 2.43 ms this way in fp8 and 2.1 ms in int4, against 3.07 and 2.79 ms in equal stretches across tiles.
    """
    rows, bits, long = tile_rows(num_rows), 8 if kind == "fp8" else 4, piece >= 128
    # Few rows with four-bit weights, and short pieces, are read quickly: more of them must be in flight.
    per_sm, stages = (2, 7 if bits == 8 else 8) if long and (bits == 8 or rows > 16) else (4, 4)
    tiles, steps, at_once = ceil_div(num_out, 64), size // piece, per_sm * processors
    split = even_split(tiles, steps, at_once)
    # Idle processors cost less where programs wait for their weights than where they are busy converting them.
    if not (0.7 if long else 0.9) * at_once <= tiles * split <= at_once:
        split = 0
    tma = long and (rows > 16 or bits == 4)
    config = GemmConfig(64, piece, split, per_sm, stages, prefetch=2 if long else 0, tma=tma)
    # With a step less in flight than fits, attention and norms find room sooner: a round of one row of an 8B model in
    # fp8 takes 2.86 ms instead of 3.00, and a round of 32 tokens 3.11 instead of 3.19.
    most = SHARED_MEMORY - NEXT_PROGRAMS
    while config.per_sm > 1 and config.shared_bytes(rows, itemsize, gated, bits) * config.per_sm > most:
        if config.stages > (4 if split else 3):
            config = replace(config, stages=config.stages - 1)
        else:
            config = replace(config, per_sm=config.per_sm - 1)
    return _fitting(config, rows, itemsize, gated, bits)


def even_split(tiles: int, steps: int, at_once: int, least: int = 4) -> int:
    """Return how many programs share a tile: as many as run at once with equally many steps each, at least `least`."""
    parts = range(1, max(1, min(at_once // tiles, steps // least)) + 1)
    return max(part for part in parts if steps % part == 0)


def _fitting(config: GemmConfig, rows: int, itemsize: int, gated: bool, code_bits: int | None = None) -> GemmConfig:
    """Return `config` with its stages reduced to what a processor has shared memory for."""
    while config.stages > 2 and config.shared_bytes(rows, itemsize, gated, code_bits) > SHARED_MEMORY - SHARED_MARGIN:
        config = replace(config, stages=config.stages - 1)
    return config


def _split(config: GemmConfig, num_out: int, size: int, programs: int) -> int:
    """Return the split_k that comes close to `programs` programs, as long as each has four steps."""
    tiles, steps = ceil_div(num_out, config.block_n), ceil_div(size, config.block_k)
    if programs // 2 < tiles < programs and tiles * steps >= 4 * programs:
        return 0
    return max(1, min(programs // tiles, steps // 4))


def stretches(split_k: int, per_sm: int, tiles: int, steps: int, processors: int) -> tuple[int, int, int, bool]:
    """Divide all steps of all tiles, `steps` each, among programs; split_k and per_sm are those of GemmConfig.

    Returns:
        Programs of a launch, never more than there are steps; steps of each program; how many programs take one more;
        whether any tile is shared.
    """
    programs = min(tiles * split_k if split_k else per_sm * processors, tiles * steps)
    base, extra = divmod(tiles * steps, programs)
    return programs, base, extra, extra > 0 or base % steps > 0


def worth_streaming(num_rows: int, num_weights: int) -> bool:
    """Whether our kernel is about as fast as cuBLAS or faster: with few rows, or with few or very many weights."""
    return num_rows <= 32 or (num_rows <= MAX_ROWS and not SMALL_WEIGHTS < num_weights < LARGE_WEIGHTS)


MAX_SIZE = 1536
"""Widest rows that a program holds at once. With wider rows, registers and shared memory are full, and re-reading the
rows in every program costs more than a launch (an RMS norm fused into products of 4096 columns was slower than a
separate one)."""
_MIN_SIZE = 16
"""Columns of a tensor core instruction."""
_SHARED_MEMORY = 200 * 1024
_GROUP_TILE = 64
"""Weight rows that the tensor cores of a whole warp group read straight from shared memory."""
_GROUP_SIZE = 640
"""Widest rows of such tiles: three of them fit on a processor, so weights of the next launches are in flight."""
_MIDDLE_SIZE = 1024
MAX_CUT_SIZE = 8192
_CUT = 512
_MAX_PROGRAMS = 200
"""Most programs that run at the same time without slowing each other down; with more, each takes more rows instead."""
_MAX_WEIGHTS = 5 << 20
"""Most weights of a matrix: a little more than the largest that were tried, 896 x 4864 and 2048 x 2048."""


@dataclass(frozen=True, slots=True)
class RowConfig:
    """One way to cut a product over whole rows."""

    tile: int = _GROUP_TILE
    """Weight rows of a program."""
    parts: int = 1
    """Most parts that the columns are cut into, each multiplied by its own warps."""
    block_m: int = 16
    """Most rows of a program; other programs take the rest."""
    warps: int = 4
    cut: int = 0
    """Columns of a program, 0 for all; sums of several programs are added up. Not for normed rows or gated products."""

    def rows(self, num_rows: int) -> int:
        """Return the rows of a program for `num_rows` in all, a power of two."""
        return min(tile_rows(num_rows), self.block_m)

    def holds(self, num_rows: int, size: int) -> bool:
        """Whether a program with this cut fits in a processor's shared memory."""
        return (self.tile + self.rows(num_rows)) * sum(pieces(size, 1)[1:]) * 2 <= _SHARED_MEMORY


def row_config(num_rows: int, num_out: int, size: int, whole: bool) -> RowConfig:
    """Return the cut for [num_rows, size] by [num_out, size]. `whole`: rows are normed, or the product is gated."""
    if size <= _GROUP_SIZE:
        return RowConfig()
    if not whole:
        config = RowConfig(cut=_CUT, warps=8)
        programs = ceil_div(num_out, config.tile) * ceil_div(num_rows, config.block_m) * ceil_div(size, _CUT)
        return config if programs <= _MAX_PROGRAMS else replace(config, block_m=32, warps=4)
    return RowConfig(tile=32 if size <= _MIDDLE_SIZE else 16, parts=4)


def fits_row_kernel(num_rows: int, size: int, whole: bool = True) -> bool:
    """Whether `norm_linear` takes rows [num_rows, size]. `whole`: rows are normed, or the product is gated."""
    return 1 <= num_rows <= MAX_ROWS and _MIN_SIZE <= size <= (MAX_SIZE if whole else MAX_CUT_SIZE)


def row_kernel_pays(num_rows: int, num_out: int, size: int, whole: bool, gated: bool = False) -> bool:
    """Whether `norm_linear` is faster on an H200 than the weight-streaming kernel and cuBLAS.

    Every cut was measured within a layer: benchmarks/results/draft_layer_h200.json.
    """
    if not fits_row_kernel(num_rows, size, whole) or num_out * size > _MAX_WEIGHTS:
        return False
    if size <= _GROUP_SIZE or not whole:
        return True
    return size <= _MIDDLE_SIZE and num_rows <= (16 if gated else 32)


def fits_qkv_kernel(num_rows: int, size: int, head_dim: int, head_norm: bool) -> bool:
    """Whether `norm_qkv` takes rows [num_rows, size]. `head_norm`: heads are normed, so a program takes whole heads."""
    config = qkv_config(size, head_dim, head_norm)
    return fits_row_kernel(num_rows, size) and config.holds(num_rows, size)


def qkv_config(size: int, head_dim: int, head_norm: bool) -> RowConfig:
    """Return the cut for `norm_qkv`."""
    if head_norm:
        return RowConfig(tile=head_dim)
    config = row_config(MAX_ROWS, head_dim, size, whole=True)
    return replace(config, tile=min(config.tile, head_dim))


def pieces(size: int, parts: int) -> tuple[int, int, int]:
    """Split `size` columns into a power of two that is full, and another one (or 0) that covers the rest.

    Returns the number of equal parts, at most `parts`, that both are cut into, and the two sizes.
    """
    first = power_of_two(size + 1) // 2
    parts = min(parts, first // _MIN_SIZE)
    return parts, first, 0 if size == first else max(power_of_two(size - first), _MIN_SIZE * parts)
