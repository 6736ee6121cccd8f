"""How products over whole rows are cut into programs, and for which shapes they are worth it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.attention_tiles import ceil_div, power_of_two

MAX_SIZE = 1536
"""Widest rows that a program takes at once: beyond it registers and shared memory are full, and re-reading the rows in
every program costs more than a launch (an RMS norm inside products of 4096 columns was slower than beside them)."""
MAX_ROWS = 64
_MIN_SIZE = 16
"""Columns that an instruction of the tensor cores takes."""
_SHARED_MEMORY = 200 * 1024
_GROUP_TILE = 64
"""Weight rows that the tensor cores of a whole warp group take straight from shared memory."""
_GROUP_SIZE = 640
"""Widest rows of such tiles: three of them fit a processor, so that weights of the next launches are on their way."""
_MIDDLE_SIZE = 1024
MAX_CUT_SIZE = 8192
_CUT = 512
_CROWD = 200
"""Programs that run at the same time without being in each other's way: with more, each takes more rows instead."""
_MAX_WEIGHTS = 5 << 20
"""Weights of the largest matrix that was tried, 896 x 4864 and 2048 x 2048, and a little."""


@dataclass(frozen=True, slots=True)
class RowConfig:
    """One way to cut a product over whole rows."""

    tile: int = _GROUP_TILE
    """Weight rows of a program."""
    parts: int = 1
    """Into how many parts the columns are cut at most, each of which is multiplied by warps of its own."""
    block_m: int = 16
    """Rows of a program at most; those beyond are other programs'."""
    warps: int = 4
    cut: int = 0
    """Columns of a program, 0 for all; others add theirs. Only where rows are neither normed nor gated."""

    def rows(self, num_rows: int) -> int:
        """Rows of a program for `num_rows` in all, a power of two."""
        return min(max(power_of_two(num_rows), 16), self.block_m)

    def holds(self, num_rows: int, size: int) -> bool:
        """Whether a program of this cut fits a processor."""
        return (self.tile + self.rows(num_rows)) * sum(pieces(size, 1)[1:]) * 2 <= _SHARED_MEMORY


def usual_config(num_rows: int, num_out: int, size: int, whole: bool) -> RowConfig:
    """The cut for [num_rows, size] by [num_out, size]. `whole`: rows are normed or gated."""
    if size <= _GROUP_SIZE:
        return RowConfig()
    if not whole:
        config = RowConfig(cut=_CUT, warps=8)
        programs = ceil_div(num_out, config.tile) * ceil_div(num_rows, config.block_m) * ceil_div(size, _CUT)
        return config if programs <= _CROWD else replace(config, block_m=32, warps=4)
    return RowConfig(tile=32 if size <= _MIDDLE_SIZE else 16, parts=4)


def fits(num_rows: int, size: int, whole: bool = True) -> bool:
    """Whether a product of [num_rows, size] can be made so. `whole`: rows are normed or gated."""
    return 1 <= num_rows <= MAX_ROWS and _MIN_SIZE <= size <= (MAX_SIZE if whole else MAX_CUT_SIZE)


def pays(num_rows: int, num_out: int, size: int, whole: bool, gated: bool = False) -> bool:
    """Whether it is the fastest way on an H200, over the kernel for large models, which is after bandwidth alone.

    Every cut was tried within a layer: benchmarks/results/draft_layer_h200.json.
    """
    if not fits(num_rows, size, whole) or num_out * size > _MAX_WEIGHTS:
        return False
    if size <= _GROUP_SIZE or not whole:
        return True
    return size <= _MIDDLE_SIZE and num_rows <= (16 if gated else 32)


def qkv_fits(num_rows: int, size: int, head_dim: int, head_norm: bool) -> bool:
    """Whether heads that are rotated can be made so. Where they are normed, too, a program takes whole heads."""
    config = qkv_config(size, head_dim, head_norm)
    return fits(num_rows, size) and config.tile <= head_dim and config.holds(num_rows, size)


def qkv_config(size: int, head_dim: int, head_norm: bool) -> RowConfig:
    """The cut for heads."""
    if head_norm:
        return RowConfig(tile=head_dim)
    config = usual_config(MAX_ROWS, head_dim, size, whole=True)
    return replace(config, tile=min(config.tile, head_dim))


def pieces(size: int, parts: int) -> tuple[int, int, int]:
    """`size` columns as a power of two that is full and another one, or 0, that need not be; behind the number of equal
    parts, at most `parts`, that both are cut into."""
    first = power_of_two(size + 1) // 2
    parts = min(parts, first // _MIN_SIZE)
    return parts, first, 0 if size == first else max(power_of_two(size - first), _MIN_SIZE * parts)
