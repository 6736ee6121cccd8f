"""The best few of each row of ranks, and the logarithm of their share, on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.cpu.isa import Isa, best_isa, needed_isa
from kernels.cpu.layout import LANES

if TYPE_CHECKING:
    from kernels.cpu.code import Code, Variable

MAX_BEST = 64
"""Of a row."""
_ARGUMENTS = ("ranks", "count", "size", "ids", "tokens", "scores", "best")
"""All int64: address of rows of ranks, rows, numbers in a row, addresses of ids and of both results, and how many of a
row are wanted."""
_PLACES = 4 * MAX_BEST
"""On the stack, values of the best, best first, lie before where they lie in the row."""
_LEAST = float("-inf")


def fits_ranks(ranks: Tensor, best: int) -> bool:
    """Whether `best_of` takes these."""
    is_served = ranks.device.type == "cpu" and ranks.dtype == torch.float32 and ranks.is_contiguous()
    return (
        is_served and best_isa() is not None and ranks.shape[1] % LANES == 0 and best <= min(MAX_BEST, ranks.shape[1])
    )


def best_of(ranks: Tensor, ids: Tensor, tokens: Tensor, scores: Tensor) -> None:
    """Write ids and log softmax of the largest numbers of each row, largest first and, of equals, the first first.

    Args:
        ranks: float32 [M, N]; those of -inf are never found. A row with a NaN has no best.
        ids: int32 [N], of each place.
        tokens: int32 [M, k], contiguous as `scores`; -1 where there are no more.
        scores: float32 [M, k], 0 at most; -inf where there are no more.
    """
    _compiled(needed_isa())(
        ranks.data_ptr(), *ranks.shape, ids.data_ptr(), tokens.data_ptr(), scores.data_ptr(), tokens.shape[1]
    )


def function_address() -> int:
    """Of what `best_of` calls, with _ARGUMENTS."""
    address: int = ctypes.cast(_compiled(needed_isa()), ctypes.c_void_p).value or 0
    return address


def prepare_ranks() -> None:
    """Compile `best_of`, if it serves here, before it is first asked for."""
    if (isa := best_isa()) is not None:
        _compiled(isa)


@cache
def _compiled(isa: Isa) -> Any:
    """`ranks` of _ARGUMENTS."""
    from kernels.cpu.code import single

    return single(isa, "ranks", _ARGUMENTS, _write)


def _write(code: Code) -> None:
    args, kept = code.args, code.room(8 * MAX_BEST)
    with code.loop(0, args["count"]) as row:
        place = code.plus(args["ranks"], code.times(code.times(row, args["size"]), 4))
        skipped = code.times(code.times(row, args["best"]), 4)
        found = _find_best(code, place, kept)
        share = _log_sum(code, place, kept)
        with code.loop(0, args["best"]) as number:
            target = code.plus(skipped, code.times(number, 4))
            _write_out(code, number, found, share, target, kept)
    code.done()


def _find_best(code: Code, row: Any, kept: Any) -> Any:
    """How many were found; the least of them is what a number must be above, once there are as many as wanted."""
    from llvmlite import ir

    from kernels.cpu.code import F32, I16, I64

    args, build = code.args, code.build
    found, bound = code.variable(I64(0)), code.variable(F32(_LEAST))
    with code.loop(0, args["size"], LANES) as first:
        values = code.load_vector(row, code.times(first, 4))
        above = build.fcmp_ordered(">", values, code.same(bound.get()))
        lanes = code.variable(build.zext(build.bitcast(above, I16), I64))
        with code.again() as go_on_if:
            go_on_if(build.icmp_signed("!=", lanes.get(), I64(0)))
            lane = code.call("llvm.cttz.i64", I64, lanes.get(), ir.IntType(1)(0))
            lanes.set(build.and_(lanes.get(), code.plus(lanes.get(), -1)))
            place = code.plus(first, lane)
            value = code.load(F32, row, code.times(place, 4))
            with code.when(build.fcmp_ordered(">", value, bound.get())):
                _keep(code, value, place, found, bound, kept)
    return found.get()


def _keep(code: Code, value: Any, place: Any, found: Variable, bound: Variable, kept: Any) -> None:
    """Behind all that are as large: lesser ones move by one, and the last leaves if there is no room."""
    from kernels.cpu.code import F32, I32, I64

    args, build = code.args, code.build
    at = code.variable(code.least(found.get(), code.plus(args["best"], -1)))

    with code.again() as go_on_if:
        before = code.times(code.plus(at.get(), -1), 4)
        is_there = build.icmp_signed(">", at.get(), I64(0))
        # Where there is none the first is looked at, for nothing.
        before = build.select(is_there, before, I64(0))
        go_on_if(build.and_(is_there, build.fcmp_ordered("<", code.load(F32, kept, before), value)))
        before, here = code.times(code.plus(at.get(), -1), 4), code.times(at.get(), 4)
        code.store(code.load(F32, kept, before), kept, here)
        code.store(code.load(I32, kept, code.plus(before, _PLACES)), kept, code.plus(here, _PLACES))
        at.set(code.plus(at.get(), -1))
    here = code.times(at.get(), 4)
    code.store(value, kept, here)
    code.store(build.trunc(place, I32), kept, code.plus(here, _PLACES))
    found.set(code.least(code.plus(found.get(), 1), args["best"]))
    with code.when(build.icmp_signed("==", found.get(), args["best"])):
        bound.set(code.load(F32, kept, code.times(code.plus(args["best"], -1), 4)))


def _log_sum(code: Code, row: Any, kept: Any) -> Any:
    """The logarithm of the sum of powers of e, the largest of which is at hand."""
    from llvmlite import ir

    from kernels.cpu.code import F32

    args, build, wide = code.args, code.build, ir.DoubleType()
    largest, total = code.load(F32, kept), code.variable(code.number(0.0))
    with code.loop(0, args["size"], LANES) as first:
        away = build.fsub(code.load_vector(row, code.times(first, 4)), code.same(largest))
        # Of a NaN `exp` would make a number.
        power = build.select(build.fcmp_unordered("uno", away, away), away, code.exp(away))
        total.set(build.fadd(total.get(), power))
    logarithm = code.call("log", wide, build.fpext(code.total(total.get()), wide))
    return build.fadd(largest, build.fptrunc(logarithm, F32))


def _write_out(code: Code, number: Any, found: Any, share: Any, target: Any, kept: Any) -> None:
    from kernels.cpu.code import F32, I32

    args, build, at = code.args, code.build, code.times(number, 4)
    code.store(I32(-1), args["tokens"], target)
    code.store(F32(_LEAST), args["scores"], target)
    with code.when(build.icmp_signed("<", number, found)):
        edge = build.fsub(code.load(F32, kept, at), share)
        with code.when(build.fcmp_ordered(">", edge, F32(_LEAST))):
            place = code.load(I32, kept, code.plus(at, _PLACES))
            place = code.times(build.zext(place, code.args["size"].type), 4)
            code.store(code.load(I32, args["ids"], place), args["tokens"], target)
            is_above = build.fcmp_ordered(">", edge, F32(0.0))
            code.store(build.select(is_above, F32(0.0), edge), args["scores"], target)
