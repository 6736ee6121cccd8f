"""See kernels.norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import supports_pdl


@triton.jit
def _rms_norm(rows, weight, out, size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    # A weight never changes, so it need not wait for the kernel before.
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * size
    row = tl.load(rows + first + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / size + eps)
    tl.store(out + first + columns, (row * scale * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(rows: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """As kernels.norm.rms_norm."""
    num_rows, size = rows.shape
    block = triton.next_power_of_2(size)
    pdl = supports_pdl(rows)
    options = {"launch_pdl": True} if pdl else {}
    # Eight elements a thread: one load of 16 bytes for two-byte numbers.
    warps = min(max(block // 256, 1), 16)
    _rms_norm[(num_rows,)](rows, weight, out, size, eps, BLOCK=block, PDL=pdl, num_warps=warps, **options)
