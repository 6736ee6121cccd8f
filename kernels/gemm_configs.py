"""How a weight-streaming product is cut into programs, and which cut suits which shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_ROWS = 64
MANY_WEIGHTS = 40_000_000
"""Not measured above; at 64 rows cuBLAS already reads some weights faster."""
FEW_WEIGHTS = 1_500_000
"""Not so many: at 64 rows, too, ours is faster, by 1.25 to 1.4 for the products of SmolLM2-135M."""
MIN_TILE = 16
SHARED_MEMORY = 227 * 1024
"""Bytes that one program can have on Hopper."""
SHARED_MARGIN = 16 * 1024
"""What is left of them for the barriers of the copy engine and whatever else Triton adds."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One way to cut a product. Sizes are in elements; a step is block_k columns of a tile of block_n weight rows.

    A memory-bound product wants 32 to 64 KB of weights in flight on every processor, equal work for all processors,
    and few re-reads of the rows: each tile reads all of them, rows/weights = M / block_n. split_k gives more programs
    without more re-reads.
    """

    block_n: int = 64
    """Weight rows of a tile; twice as many where gated."""
    block_k: int = 128
    split_k: int = 1
    """Programs that share a tile; 0: per_sm programs a processor share all steps of all tiles evenly."""
    per_sm: int = 1
    stages: int = 4
    """Steps in flight in shared memory."""
    warps: int = 4
    swap: bool = True
    """Weights are the left operand: with block_n >= 64 that is wgmma straight from shared memory."""
    tma: bool = False
    """Tiles come by the copy engine, not by cp.async; needs K * itemsize to be a multiple of 16."""
    prefetch: int = 0
    """Steps that a program asks into L2 before it waits for the kernel before it."""
    bulk: bool = True
    """Prefetch whole pieces of a weight row by the copy engine, not line by line."""
    pdl: bool = True
    """Start while the kernel before ends (Hopper and later)."""

    def shared_bytes(self, num_rows: int, itemsize: int, gated: bool) -> int:
        """Shared memory of the steps in flight; Triton adds a little, and up to a tile in float32 where it converts."""
        weights = self.block_n * (2 if gated else 1)
        return self.stages * (weights + tile_rows(num_rows)) * self.block_k * itemsize


def tile_rows(num_rows: int) -> int:
    """Rows that programs compute for `num_rows` real ones: a power of two."""
    size = MIN_TILE
    while size < num_rows:
        size *= 2
    return size


# The fastest cuts on an H200 (benchmarks/results/kernels_gemm_h200.json), by (num_out, size, gated, rows of a tile),
# for two-byte weights.
# cuBLAS reads 3.07 TB/s against our 2.82 for (6144, 4096) at 64 rows, and 2.87 against 2.70 for (4096, 4096) there;
# for (6144, 4096) and the gated product at up to 32 rows the two are within 3 % of each other. With rows on the left 64
# rows were up to a tenth faster, but Triton 3.6 cannot compile that for every kind of output.
_TUNED: dict[tuple[int, int, bool, int], GemmConfig] = {
    (6144, 4096, False, 16): GemmConfig(64, 128, split_k=0, stages=7, prefetch=4),
    (6144, 4096, False, 32): GemmConfig(64, 128, split_k=0, stages=7, prefetch=4, tma=True),
    (6144, 4096, False, 64): GemmConfig(64, 128, split_k=0, stages=6, prefetch=4),
    (4096, 4096, False, 16): GemmConfig(64, 128, stages=8, prefetch=4, tma=True),
    (4096, 4096, False, 32): GemmConfig(64, 128, stages=8, prefetch=4, tma=True),
    (4096, 4096, False, 64): GemmConfig(64, 128, split_k=2, stages=6, prefetch=4, tma=True),
    (14336, 4096, True, 16): GemmConfig(64, 64, stages=7, prefetch=4),
    (14336, 4096, True, 32): GemmConfig(64, 128, stages=5, prefetch=2, tma=True),
    (14336, 4096, True, 64): GemmConfig(64, 128, stages=4, tma=True),
    (4096, 14336, False, 16): GemmConfig(64, 128, stages=8, prefetch=4),
    (4096, 14336, False, 32): GemmConfig(64, 128, stages=8, prefetch=4),
    (4096, 14336, False, 64): GemmConfig(64, 128, split_k=2, stages=6, prefetch=4),
    (49152, 4096, False, 16): GemmConfig(64, 64, stages=8, prefetch=4, bulk=False),
    (49152, 4096, False, 32): GemmConfig(128, 64, stages=3, tma=True),
    (49152, 4096, False, 64): GemmConfig(128, 128, stages=4),
    # SmolLM2-135M, a draft model: bound by latency, so narrow tiles with all their steps in flight. Over cuBLAS by 1.1
    # (gated) to 1.5; its output matrix is read at 3.2 to 3.4 TB/s by both.
    (960, 576, False, 16): GemmConfig(64, 128, stages=6, prefetch=8, bulk=False),
    (960, 576, False, 32): GemmConfig(16, 64, stages=8, warps=2, swap=False, prefetch=8, bulk=False),
    (960, 576, False, 64): GemmConfig(32, 128, stages=3, swap=False, prefetch=8, bulk=False),
    (576, 576, False, 16): GemmConfig(64, 64, stages=8, prefetch=8, bulk=False),
    (576, 576, False, 32): GemmConfig(16, 64, stages=8, warps=2, swap=False, prefetch=8, bulk=False),
    (576, 576, False, 64): GemmConfig(32, 128, stages=3, swap=False, prefetch=8, bulk=False),
    (1536, 576, True, 16): GemmConfig(64, 64, stages=7, prefetch=32),
    (1536, 576, True, 32): GemmConfig(64, 64, stages=7, prefetch=32),
    (576, 1536, False, 16): GemmConfig(32, 128, split_k=4, swap=False, prefetch=2),
    (576, 1536, False, 32): GemmConfig(16, 128, stages=8, swap=False, prefetch=8, bulk=False),
    (576, 1536, False, 64): GemmConfig(16, 256, stages=3, swap=False, prefetch=8, bulk=False),
}


def choose_config(num_out: int, size: int, num_rows: int, gated: bool, itemsize: int, processors: int) -> GemmConfig:
    """A config for weights [num_out, size] ([2 num_out, size] if gated) and M up to tile_rows(num_rows)."""
    rows = tile_rows(num_rows)
    tuned = _TUNED.get((num_out, size, gated, rows))
    if tuned is not None and itemsize == 2:
        return tuned
    if itemsize > 2:
        # Without tensor cores for float32, tiles are limited by registers.
        config = GemmConfig(block_n=32, block_k=32, per_sm=2, stages=3, swap=False)
        return replace(config, split_k=_split(config, num_out, size, 2 * processors))
    # As the tuned ones: one deep program a processor. Many tiles of few rows are best read in small steps.
    many = num_out >= 64 * processors
    block_k = 64 if (many and rows <= 16) or (size % 128 and size < 2048) else 128
    config = GemmConfig(block_n=64, block_k=block_k, stages=8, prefetch=4, tma=rows >= 32)
    while config.shared_bytes(rows, itemsize, gated) > SHARED_MEMORY - SHARED_MARGIN:
        config = replace(config, stages=config.stages - 1)
    return replace(config, split_k=_split(config, num_out, size, processors))


def _split(config: GemmConfig, num_out: int, size: int, programs: int) -> int:
    """The split_k that comes near a number of programs, as long as each has four steps."""
    tiles, steps = -(-num_out // config.block_n), -(-size // config.block_k)
    if programs // 2 < tiles < programs and tiles * steps >= 4 * programs:
        return 0
    return max(1, min(programs // tiles, steps // 4))


def worth_streaming(num_rows: int, num_weights: int) -> bool:
    """Whether our product is about as fast as cuBLAS or faster: for few rows, and for more where weights are many."""
    return num_rows <= 32 or (num_rows <= MAX_ROWS and not FEW_WEIGHTS < num_weights < MANY_WEIGHTS)
