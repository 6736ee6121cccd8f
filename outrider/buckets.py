"""Sizes that work on a device is padded to, so that few shapes are captured. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

TOKEN_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of a round."""


def width_buckets(widths: Sequence[int], max_width: int) -> list[int]:
    """Those of the rising `widths` that are below `max_width`, which ends the list."""
    return [width for width in widths if width < max_width] + [max_width]


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, ... up to `max_rows`, which ends the list."""
    return [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows] + [max_rows]
