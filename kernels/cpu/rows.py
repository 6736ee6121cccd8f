"""Functions of rows on a CPU that are called on their own: RMS norms, and top k.

Their code is in kernels.cpu.row_code, which needs LLVM and is imported when they are compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.isa import Isa, best_isa, needed_isa
from kernels.cpu.layout import LANES, MAX_BEST, float_bits


@cache
def row_function(isa: Isa, name: str) -> Any:
    """Return a compiled function of kernels.cpu.row_code."""
    from kernels.cpu.code import compiled_function
    from kernels.cpu.row_code import FUNCTIONS

    return compiled_function(isa, name, *FUNCTIONS[name])


def fits_norm(rows: Tensor) -> bool:
    """Whether `rms_norm` takes these rows."""
    is_served = rows.device.type == "cpu" and rows.dtype == torch.bfloat16 and rows.ndim == 2
    return is_served and rows.shape[1] % LANES == 0 and rows.is_contiguous() and best_isa() is not None


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows bfloat16 [M, N] scaled to unit root mean square, then by float32 `weight` [N], rounded once."""
    out, norm = torch.empty_like(rows), row_function(needed_isa(), "norm")
    norm(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), *rows.shape, float_bits(eps))
    return out


def fits_top_k(values: Tensor, best: int) -> bool:
    """Whether `write_top_k` takes these values."""
    is_served = values.device.type == "cpu" and values.dtype == torch.float32 and values.is_contiguous()
    return (
        is_served and best_isa() is not None and values.shape[1] % LANES == 0 and best <= min(MAX_BEST, values.shape[1])
    )


def write_top_k(values: Tensor, ids: Tensor, tokens: Tensor, scores: Tensor) -> None:
    """Write ids and log softmax of the largest numbers of each row, largest first; among equals, the earlier first.

    Args:
        values: float32 [M, N]; values of -inf are never chosen. A row with a NaN has no best.
        ids: int32 [N], the id of each place.
        tokens: int32 [M, k], contiguous; -1 where there are no more.
        scores: float32 [M, k], contiguous, at most 0; -inf where there are no more.
    """
    row_function(needed_isa(), "top_k")(
        values.data_ptr(), *values.shape, ids.data_ptr(), tokens.data_ptr(), scores.data_ptr(), tokens.shape[1]
    )


def prepare_top_k() -> None:
    """Compile `write_top_k` before it is needed, if it can run here."""
    if (isa := best_isa()) is not None:
        row_function(isa, "top_k")
