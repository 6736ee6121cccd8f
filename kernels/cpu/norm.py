"""RMS norms of rows in bfloat16 on a CPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.cpu.isa import Isa, best_isa, needed_isa
from kernels.cpu.layout import LANES, float_bits

if TYPE_CHECKING:
    from kernels.cpu.code import Code, Module

_NORM = ("x", "weight", "out", "count", "size", "eps")
"""All int64: addresses, rows, columns, and the bits of a float32."""


def fits_norm(rows: Tensor) -> bool:
    """Whether `rms_norm` takes these rows."""
    is_served = rows.device.type == "cpu" and rows.dtype == torch.bfloat16 and rows.ndim == 2
    return is_served and rows.shape[1] % LANES == 0 and rows.is_contiguous() and best_isa() is not None


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows bfloat16 [M, N] scaled to unit root mean square, then by float32 `weight` [N], rounded once."""
    out = torch.empty_like(rows)
    compiled_norm(needed_isa())(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), *rows.shape, float_bits(eps))
    return out


@cache
def compiled_norm(isa: Isa) -> Any:
    """`norm` of _NORM."""
    from kernels.cpu.code import single

    return single(isa, "norm", _NORM, _write)


def write_norm(module: Module) -> None:
    """`norm` of _NORM."""
    from kernels.cpu.code import Code

    _write(Code(module, "norm", _NORM))


def _write(code: Code) -> None:
    from kernels.cpu.code import F32, I32

    args, build = code.args, code.build
    eps = build.bitcast(build.trunc(args["eps"], I32), F32)
    with code.loop(0, args["count"]) as row:
        start = code.times(code.times(row, args["size"]), 2)
        places = code.plus(args["x"], start), code.plus(args["out"], start)
        norm_row(code, *places, args["weight"], args["size"], eps)
    code.done()


def norm_row(code: Code, source: Any, target: Any, weight: Any, size: Any, eps: Any) -> None:
    """`size` numbers scaled to unit root mean square, then by float32 weights."""
    build = code.build
    squares = code.variable(code.number(0.0))
    with code.loop(0, size, LANES) as column:
        values = code.load_halves(source, code.times(column, 2))
        squares.set(code.fma(values, values, squares.get()))
    mean = build.fdiv(code.total(squares.get()), build.sitofp(size, eps.type))
    factor = code.same(code.inverse_root(build.fadd(mean, eps)))
    with code.loop(0, size, LANES) as column:
        values = build.fmul(code.load_halves(source, code.times(column, 2)), factor)
        scaled = build.fmul(values, code.load_vector(weight, code.times(column, 4)))
        code.store_halves(scaled, target, code.times(column, 2))
