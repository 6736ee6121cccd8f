"""Finding the integers that a bfloat16 matrix was made of: GGUF's Q8_0, whose groups of 32 have a scale in float16."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.cpu.isa import Isa, needed_isa
from kernels.cpu.layout import GROUP, LANES, TILE
from kernels.cpu.products import Packed, packed_eight

if TYPE_CHECKING:
    from kernels.cpu.code import Code, Variable

_MOST = 127
_NEAREST = 4
"""Numbers of float16 on either side of one that bfloat16's rounding may hide."""
_FIND = ("w", "groups", "codes", "scales", "found")
"""All int64: addresses of weights, of int8 codes and float32 scales, and of how many groups are on levels, so far as
they are without a gap; and groups."""
_TINY = 1e-30
_PART = 128
"""Tiles that are looked at together, for the sake of memory."""


def eight_bits(weight: Tensor) -> Packed | None:
    """A bfloat16 weight [out, in] that `products.fits` and that lies on 255 even levels around zero in each group: half
    of the bytes to read. None for any other.

    Codes and scales give the weights, rounded to bfloat16, exactly.
    """
    found = _codes(weight)
    return None if found is None else packed_eight(*found)


def round_to_eight_bits(weight: Tensor) -> None:
    """Lay a bfloat16 weight [out, in], in its place, on such levels: the largest of a group is the last."""
    for part in weight.split(_PART * TILE):
        places = part.float().view(part.shape[0], -1, GROUP)
        scales = (places.abs().amax(2, keepdim=True) / _MOST).half().float()
        codes = places.div_(scales.clamp(min=_TINY)).round_().clamp_(-_MOST, _MOST)
        part.copy_(codes.mul_(scales).view(part.shape))


def _codes(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Codes int8 [out, in] and scales float32 [out, in / GROUP]; the first group that has none ends the search."""
    weight = weight.contiguous()
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // GROUP)
    found = torch.zeros(1, dtype=torch.int64)
    _finder(needed_isa())(weight.data_ptr(), scales.numel(), codes.data_ptr(), scales.data_ptr(), found.data_ptr())
    return (codes, scales) if int(found) == scales.numel() else None


@cache
def _finder(isa: Isa) -> Any:
    """`find` of _FIND."""
    from kernels.cpu.code import single

    return single(isa, "find", _FIND, _write)


def _write(code: Code) -> None:
    """The largest weight of a group is 127 scales, rounded, or all are zeros: numbers near are tried one by one."""
    from llvmlite import ir

    from kernels.cpu.code import F32, I16, I64

    args, build = code.args, code.build
    with code.loop(0, args["groups"]) as group:
        at = code.plus(args["w"], code.times(group, 2 * GROUP))
        largest = code.farthest([code.load_halves(at, 2 * LANES * half) for half in range(2)])
        middle = build.fptrunc(build.fdiv(largest, F32(_MOST)), ir.HalfType())
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
    """Keep a group's codes and close it, if this scale and they give the weights."""
    from llvmlite import ir

    from kernels.cpu.code import F32, I8, I16, I64

    args, build = code.args, code.build
    words, octets = ir.VectorType(I16, LANES), ir.VectorType(I8, LANES)
    is_small = build.fcmp_ordered("<", scale, F32(_TINY))
    inverse = code.same(build.select(is_small, F32(0.0), build.fdiv(F32(1.0), scale)))
    numbers, is_same = [], ir.IntType(1)(1)
    for half in range(2):
        wanted = code.load(words, at, 2 * LANES * half)
        number = code.rounded(build.fmul(code.load_halves(at, 2 * LANES * half), inverse))
        numbers.append(number)
        given = build.bitcast(code.halves(build.fmul(number, code.same(scale))), words)
        are_right = build.and_(
            build.icmp_signed("==", given, wanted), build.fcmp_ordered("<=", code.absolute(number), code.number(_MOST))
        )
        is_same = build.and_(is_same, build.icmp_signed("==", build.bitcast(are_right, I16), I16(-1)))
    with code.when(is_same):
        for half, number in enumerate(numbers):
            place = code.plus(args["codes"], code.times(group, GROUP), half * LANES)
            code.store(build.fptosi(number, octets), place)
        code.store(scale, args["scales"], code.times(group, 4))
        is_open.set(I64(0))
