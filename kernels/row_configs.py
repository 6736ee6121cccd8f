"""How products over whole rows are cut into programs, and which shapes they take."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.attention_tiles import power_of_two

MAX_SIZE = 1024
"""Widest rows that a program takes at once: beyond it registers and shared memory are full, and re-reading the rows in
every program costs more than a launch (an RMS norm inside products of 4096 columns was slower than beside them)."""
MAX_ROWS = 64
TILE = 64
"""Weight rows of a program: what one instruction of the tensor cores takes straight from shared memory."""
_MIN_SIZE = 16
_SHARED_MEMORY = 200 * 1024


@dataclass(frozen=True, slots=True)
class RowConfig:
    """One way to cut a product over whole rows."""

    block_m: int = 32
    """Rows of a program at most; those beyond are other programs'."""
    warps: int = 8

    def rows(self, num_rows: int) -> int:
        """Rows of a program for `num_rows` in all, a power of two."""
        return min(max(power_of_two(num_rows), 16), self.block_m)


def fits(num_rows: int, size: int, tile: int = TILE) -> bool:
    """Whether a product of [num_rows, size] may be made of whole rows, `tile` weight rows a program."""
    if not (1 <= num_rows <= MAX_ROWS and _MIN_SIZE <= size <= MAX_SIZE):
        return False
    return (tile + RowConfig().rows(num_rows)) * sum(pieces(size)) * 2 <= _SHARED_MEMORY


def qkv_fits(num_rows: int, size: int, head_dim: int, head_norm: bool) -> bool:
    """The same for heads that are rotated, and normed if `head_norm`."""
    return head_dim >= TILE and fits(num_rows, size, 2 * pairs_of(head_dim, head_norm))


def pairs_of(head_dim: int, head_norm: bool) -> int:
    """Pairs of channels of a program: whole heads where they are normed."""
    return head_dim // 2 if head_norm else TILE // 2


def pieces(size: int) -> tuple[int, int]:
    """`size` columns as a power of two that is full and another one, or 0, that need not be."""
    first = power_of_two(size + 1) // 2
    return first, 0 if size == first else max(power_of_two(size - first), _MIN_SIZE)
