"""See kernels.activation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import supports_pdl


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """As kernels.activation.silu_mul, into `out`."""
    num_rows, size = out.shape
    pdl = supports_pdl(gate_up)
    options = {"launch_pdl": True} if pdl else {}
    _silu_mul[(num_rows, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024, PDL=pdl, num_warps=4, **options)
