"""Conversion of eight- and four-bit weights (kernels.quant_weight) in registers, for the kernels that multiply them."""

from __future__ import annotations

import triton
import triton.language as tl

# With the sign at the top of a 16-bit lane and the rest shifted right by four, a code reads as its value times 2^-120.
FP8_CODES = tl.constexpr(
    """{
.reg .b32 s, t, m;
mov.b32 m, 0x7b807b80;
shl.b32 s, $2, 8;
shl.b32 t, $2, 4;
and.b32 t, t, 0x07f007f0;
lop3.b32 s, s, 0x80008000, t, 0xea;
mul.bf16x2 $0, s, m;
shr.b32 t, $2, 4;
and.b32 t, t, 0x07f007f0;
lop3.b32 s, $2, 0x80008000, t, 0xea;
mul.bf16x2 $1, s, m;
}"""
)
"""Convert words $2 to their two codes $0 and $1 in bfloat16, two words at a time."""
# A nibble in the last bits of bfloat16 128 adds its value exactly.
INT4_CODES = tl.constexpr(
    """{
.reg .b32 a;
lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea;
sub.bf16x2 $0, a, $5;
shr.b32 a, $4, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
sub.bf16x2 $1, a, $5;
shr.b32 a, $4, 8;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
sub.bf16x2 $2, a, $5;
shr.b32 a, $4, 12;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
sub.bf16x2 $3, a, $5;
}"""
)
"""Convert words $4 to their four codes $0 to $3, less $5 - 128, in bfloat16, two words at a time."""
# With exponent and mantissa at the place of bfloat16's, a code reads as its value times 2^-126.
MXFP4_CODES = tl.constexpr(
    """{
.reg .b32 s, t, m;
mov.b32 m, 0x7e807e80;
shl.b32 s, $4, 12;
shl.b32 t, $4, 6;
and.b32 t, t, 0x01c001c0;
lop3.b32 s, s, 0x80008000, t, 0xea;
mul.bf16x2 $0, s, m;
shl.b32 s, $4, 8;
shl.b32 t, $4, 2;
and.b32 t, t, 0x01c001c0;
lop3.b32 s, s, 0x80008000, t, 0xea;
mul.bf16x2 $1, s, m;
shl.b32 s, $4, 4;
shr.b32 t, $4, 2;
and.b32 t, t, 0x01c001c0;
lop3.b32 s, s, 0x80008000, t, 0xea;
mul.bf16x2 $2, s, m;
shr.b32 t, $4, 6;
and.b32 t, t, 0x01c001c0;
lop3.b32 s, $4, 0x80008000, t, 0xea;
mul.bf16x2 $3, s, m;
}"""
)
"""Convert words $4 to their four e2m1 codes $0 to $3 in bfloat16, two words at a time."""


@triton.jit
def code_values(words, PART: tl.constexpr, KIND: tl.constexpr):
    """Return the float32 values of code number PART of each word; 0 to 15 for int4."""
    if KIND == "fp8":
        codes = ((words >> (8 * PART)) & 255).to(tl.uint8)
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        codes = (words >> (4 * PART)) & 15
        values = codes.to(tl.float32)
        if KIND == "mxfp4":
            magnitude = (codes & 7).to(tl.float32)
            # 0, 0.5, 1, 1.5, 2, 3, 4, 6: steps of a half up to 2, then of 1, then of 2.
            far = tl.where(magnitude < 6, magnitude - 2.0, 2.0 * magnitude - 8.0)
            values = tl.where(magnitude < 4, magnitude * 0.5, far)
            values = tl.where(codes >= 8, -values, values)
    return values


@triton.jit
def _decode(words, zero, like, KIND: tl.constexpr, ASM: tl.constexpr):
    """Return the weights [weight rows, columns] of words in the dtype of `like`; int4 less `zero` [weight rows, 1]."""
    if ASM:
        if KIND == "fp8":
            first, second = tl.inline_asm_elementwise(
                FP8_CODES, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
            if KIND == "mxfp4":
                first, second, third, fourth = tl.inline_asm_elementwise(
                    MXFP4_CODES, "=&r,=&r,=&r,=&r,r", [words], dtype=kinds, is_pure=True, pack=2
                )
            else:
                less = (zero + 128.0).to(tl.bfloat16)
                first, second, third, fourth = tl.inline_asm_elementwise(
                    INT4_CODES, "=&r,=&r,=&r,=&r,r,r", [words, less], dtype=kinds, is_pure=True, pack=2
                )
    else:
        first = (code_values(words, 0, KIND) - zero).to(like.dtype)
        second = (code_values(words, 1, KIND) - zero).to(like.dtype)
        if KIND != "fp8":
            third = (code_values(words, 2, KIND) - zero).to(like.dtype)
            fourth = (code_values(words, 3, KIND) - zero).to(like.dtype)
    # No data moves here: only names of registers change.
    if KIND == "fp8":
        weights = tl.permute(tl.join(first, second), (0, 2, 1))
    else:
        weights = tl.permute(tl.join(tl.join(first, second), tl.join(third, fourth)), (0, 3, 2, 1))
    return tl.reshape(weights, [words.shape[0], words.shape[1] * (2 if KIND == "fp8" else 4)])


@triton.jit
def of_group(table, column, rows_of_scales, num_scales, GROUP: tl.constexpr):
    """Load the scales, or zeros, of a tile's weight rows for the group of `column` as float32."""
    return tl.load(table + tl.cast(column // GROUP, tl.int64) * num_scales + rows_of_scales).to(tl.float32)


@triton.jit
def add_words(
    acc, words, factors, scales, zeros, of_row, column, num_scales,
    KIND: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr, one=None,
):  # fmt: skip
    """Return acc [weight rows, rows] plus the product of a piece of columns from `column` on.

    `words` [weight rows, depth] and `factors` [rows, piece] are those of the piece; `of_row` [weight rows] are rows of
    scales. If each row has a single scale, `one` is 1.0, unknown to the compiler, and the caller scales the whole sum.
    """
    zero = tl.full([words.shape[0], 1], 8.0 if KIND == "int4" else 0.0, tl.float32)
    if zeros is not None:
        zero = of_group(zeros, column, of_row, num_scales, GROUP)[:, None]
    weights = _decode(words, zero, factors, KIND, ASM)
    # The multiplication keeps the addition out of the dot product, whose instructions would wait for each other.
    part = tl.dot(weights, tl.trans(factors), input_precision="ieee")
    if one is not None:
        return acc + part * one
    return acc + part * of_group(scales, column, of_row, num_scales, GROUP)[:, None]
