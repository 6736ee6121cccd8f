"""Code of functions that are called on their own: those of kernels.cpu.rows, and `find` of kernels.cpu.products.

Norms are also parts of kernels.cpu.layer_code.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.cpu.code import F32, I8, I16, I32, I64, Code, Variable
from kernels.cpu.layout import GROUP, LANES, LARGEST_CODE, MAX_BEST, TINY

NORM_ARGS = ("x", "weight", "out", "count", "size", "eps")
"""Arguments of `norm`, all int64: addresses, rows, columns, and the bits of a float32."""
_TOP_K_ARGS = ("values", "count", "size", "ids", "tokens", "scores", "best")
"""Arguments of `top_k`, all int64: address of rows of values, number of rows, numbers in a row, addresses of ids and of
both results, and how many of a row are wanted."""
_FIND_ARGS = ("w", "groups", "codes", "scales", "found")
"""Arguments of `find`, all int64: address of weights, number of groups, addresses of int8 codes and float32 scales, and
address of the result: how many leading groups are exactly codes times a scale, rounded."""
_PLACES = 4 * MAX_BEST
"""Offset on the stack of the places of the best numbers in their row, after their values, best first."""
_LEAST = float("-inf")
_NEAREST = 4
"""How many float16 numbers to either side are tried, since bfloat16's rounding hides the exact scale."""


def write_norm(code: Code) -> None:
    """Write the body of `norm`, a function of NORM_ARGS."""
    args, build = code.args, code.build
    eps = build.bitcast(build.trunc(args["eps"], I32), F32)
    with code.loop(0, args["count"]) as row:
        start = code.times(code.times(row, args["size"]), 2)
        places = code.plus(args["x"], start), code.plus(args["out"], start)
        norm_row(code, *places, args["weight"], args["size"], eps)
    code.done()


def norm_row(code: Code, source: Any, target: Any, weight: Any, size: Any, eps: Any) -> None:
    """Scale `size` numbers to unit root mean square, then by float32 weights."""
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


def _write_top_k(code: Code) -> None:
    args, kept = code.args, code.room(8 * MAX_BEST)
    with code.loop(0, args["count"]) as row:
        place = code.plus(args["values"], code.times(code.times(row, args["size"]), 4))
        skipped = code.times(code.times(row, args["best"]), 4)
        found = _find_best(code, place, kept)
        share = _log_sum(code, place, kept)
        with code.loop(0, args["best"]) as number:
            target = code.plus(skipped, code.times(number, 4))
            _write_out(code, number, found, share, target, kept)
    code.done()


def _find_best(code: Code, row: Any, kept: Any) -> Any:
    """Find the best numbers of a row and return how many. Once there are enough, only numbers above the least enter."""
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
    """Insert a number after all that are as large; smaller ones move by one, and a last one past `best` is dropped."""
    args, build = code.args, code.build
    at = code.variable(code.least(found.get(), code.plus(args["best"], -1)))
    with code.again() as go_on_if:
        before = code.times(code.plus(at.get(), -1), 4)
        is_there = build.icmp_signed(">", at.get(), I64(0))
        # If there is none, read the first; it is not used.
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
    """Return the logarithm of the sum of exp over a row, whose largest number is known."""
    args, build, wide = code.args, code.build, ir.DoubleType()
    largest, total = code.load(F32, kept), code.variable(code.number(0.0))
    with code.loop(0, args["size"], LANES) as first:
        away = build.fsub(code.load_vector(row, code.times(first, 4)), code.same(largest))
        # `exp` would turn NaN into a number.
        power = build.select(build.fcmp_unordered("uno", away, away), away, code.exp(away))
        total.set(build.fadd(total.get(), power))
    logarithm = code.call("log", wide, build.fpext(code.total(total.get()), wide))
    return build.fadd(largest, build.fptrunc(logarithm, F32))


def _write_out(code: Code, number: Any, found: Any, share: Any, target: Any, kept: Any) -> None:
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


def _write_find(code: Code) -> None:
    """Write `find`. A group's largest weight is 127 scales, rounded, or all are zeros, so scales nearby are tried."""
    args, build = code.args, code.build
    with code.loop(0, args["groups"]) as group:
        at = code.plus(args["w"], code.times(group, 2 * GROUP))
        largest = code.farthest([code.load_halves(at, 2 * LANES * half) for half in range(2)])
        middle = build.fptrunc(build.fdiv(largest, F32(LARGEST_CODE)), ir.HalfType())
        middle = build.zext(build.bitcast(middle, I16), I64)
        is_open = code.variable(I64(1))
        with code.loop(-_NEAREST, _NEAREST + 1) as step, code.when(build.icmp_signed("!=", is_open.get(), I64(0))):
            tried = build.bitcast(build.trunc(code.plus(middle, step), I16), ir.HalfType())
            _try(code, at, group, build.fpext(tried, F32), is_open)
        with code.when(build.icmp_signed("!=", is_open.get(), I64(0))):
            code.done()
        code.store(code.plus(group, 1), args["found"])
    code.done()


def _try(code: Code, at: Any, group: Any, scale: Any, is_open: Variable) -> None:
    """Store a group's codes and close the group, if these codes and this scale give its weights."""
    args, build = code.args, code.build
    words, octets = ir.VectorType(I16, LANES), ir.VectorType(I8, LANES)
    is_small = build.fcmp_ordered("<", scale, F32(TINY))
    inverse = code.same(build.select(is_small, F32(0.0), build.fdiv(F32(1.0), scale)))
    numbers, is_same = [], ir.IntType(1)(1)
    for half in range(2):
        wanted = code.load(words, at, 2 * LANES * half)
        number = code.rounded(build.fmul(code.load_halves(at, 2 * LANES * half), inverse))
        numbers.append(number)
        given = build.bitcast(code.halves(build.fmul(number, code.same(scale))), words)
        is_equal = build.icmp_signed("==", given, wanted)
        is_code = build.fcmp_ordered("<=", code.absolute(number), code.number(LARGEST_CODE))
        are_right = build.and_(is_equal, is_code)
        is_same = build.and_(is_same, build.icmp_signed("==", build.bitcast(are_right, I16), I16(-1)))
    with code.when(is_same):
        for half, number in enumerate(numbers):
            place = code.plus(args["codes"], code.times(group, GROUP), half * LANES)
            code.store(build.fptosi(number, octets), place)
        code.store(scale, args["scales"], code.times(group, 4))
        is_open.set(I64(0))


FUNCTIONS = {"norm": (NORM_ARGS, write_norm), "top_k": (_TOP_K_ARGS, _write_top_k), "find": (_FIND_ARGS, _write_find)}
"""Arguments and writer of each function."""
