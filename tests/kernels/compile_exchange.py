"""Compiles the kernels of exchange. See compile_only.py."""

from __future__ import annotations

import torch

_CASES = [
    (torch.bfloat16, 2, 576),
    (torch.bfloat16, 4, 8192),
    (torch.float32, 2, 8192),
    (torch.float32, 4, 576),
]
"""Number formats, ranks and widths: every two of them meet."""


def main() -> None:
    """Call every launcher; each launch is a compilation."""
    from kernels.exchange_state import Mailboxes
    from kernels.jit import exchange

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.int32)

    for dtype, world, width in _CASES:
        rows, weight = torch.zeros(8, width, dtype=dtype), torch.zeros(width, dtype=dtype)
        table = torch.zeros(world, dtype=torch.int64)
        boxes = Mailboxes(1, world, 16, width, dtype, table, ints(16), ints(1), ints(1))
        # Normed sums in one shot and plain ones in two, for half of the cases the other way round.
        is_normed_in_two = (world == 2) == (width == 576)
        exchange.sum_rows(boxes, rows, rows, weight, 1e-5, rows, rows, is_normed_in_two)
        exchange.sum_rows(boxes, rows, None, None, 0.0, rows, rows, not is_normed_in_two)
        exchange.join_columns(boxes, rows, torch.zeros(8, world, width, dtype=dtype), 2)
