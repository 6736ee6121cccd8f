"""Weights of eight and four bits (kernels.quant_weight) in registers, as the kernels that multiply them have them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_fp8(codes, like, ASM: tl.constexpr):
    """Bytes of e4m3 in the dtype of `like`."""
    if ASM:
        # Of four bytes: to the tops of lanes, sign left and the rest right by four is the value times 2^-120.
        values = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.b32 s, a, 4;
            shr.b32 t, b, 4;
            and.b32 s, s, 0x07f007f0;
            and.b32 t, t, 0x07f007f0;
            lop3.b32 s, a, 0x80008000, s, 0xea;
            lop3.b32 t, b, 0x80008000, t, 0xea;
            mov.b32 a, 0x7b807b80;
            mul.bf16x2 $0, s, a;
            mul.bf16x2 $1, t, a;
            }""",
            "=&r,=&r,r",
            [codes.to(tl.int8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        values = codes.to(like.dtype)
    return values


@triton.jit
def decode_int4(codes, zero, like, ASM: tl.constexpr):
    """Low and high nibbles of bytes less `zero` [weight rows, 1], in the dtype of `like`."""
    if ASM:
        # A nibble in the last bits of 128 is 128 more, exactly.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.b32 c, a, 4;
            shr.b32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            sub.bf16x2 $0, a, $5;
            sub.bf16x2 $1, b, $6;
            sub.bf16x2 $2, c, $5;
            sub.bf16x2 $3, d, $6;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes.to(tl.int8, bitcast=True), (zero + 128.0).to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((codes & 15).to(tl.float32) - zero).to(like.dtype)
        high = ((codes >> 4).to(tl.float32) - zero).to(like.dtype)
    return low, high


@triton.jit
def decode_mxfp4(codes, like, ASM: tl.constexpr):
    """Low and high nibbles of bytes, e2m1, in the dtype of `like`."""
    if ASM:
        # Exponent and mantissa at the place of bfloat16's are the value times 2^-126.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t, m;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            mov.b32 m, 0x7e807e80;
            shl.b32 s, a, 12;
            shl.b32 t, a, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 s, s, 0x80008000, t, 0xea;
            mul.bf16x2 $0, s, m;
            shl.b32 s, b, 12;
            shl.b32 t, b, 6;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 s, s, 0x80008000, t, 0xea;
            mul.bf16x2 $1, s, m;
            shl.b32 s, a, 8;
            shl.b32 t, a, 2;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 s, s, 0x80008000, t, 0xea;
            mul.bf16x2 $2, s, m;
            shl.b32 s, b, 8;
            shl.b32 t, b, 2;
            and.b32 t, t, 0x01c001c0;
            lop3.b32 s, s, 0x80008000, t, 0xea;
            mul.bf16x2 $3, s, m;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [codes.to(tl.int8, bitcast=True)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = e2m1(codes & 15).to(like.dtype)
        high = e2m1(codes >> 4).to(like.dtype)
    return low, high


@triton.jit
def e2m1(codes):
    """Codes of four bits, float32."""
    magnitude = (codes & 7).to(tl.float32)
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6: halves up to three, then twice as far apart, and again.
    value = tl.where(magnitude < 4, magnitude * 0.5, tl.where(magnitude < 6, magnitude - 2.0, 2.0 * magnitude - 8.0))
    return tl.where(codes >= 8, -value, value)


@triton.jit
def of_group(table, column, rows_of_scales, num_scales, GROUP: tl.constexpr):
    """The scales, or zeros, of a tile's weight rows for the group of `column`, float32."""
    return tl.load(table + tl.cast(column // GROUP, tl.int64) * num_scales + rows_of_scales).to(tl.float32)


@triton.jit
def add_nibbles(
    acc, codes, left, right, scales, zeros, of_row, column, num_scales,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [weight rows, rows] plus the product of BLOCK_K columns from `column` with 4-bit weights.

    `codes` [weight rows, BLOCK_K / 2]; `left` and `right` [rows, BLOCK_K / 2] are the columns of their low and high
    nibbles. `of_row` [weight rows] is where rows have their scales.
    """
    HALF: tl.constexpr = BLOCK_K // 2
    scale = of_group(scales, column, of_row, num_scales, GROUP)
    if KIND == "mxfp4":
        low, high = decode_mxfp4(codes, left, ASM)
    else:
        zero = tl.full([of_row.shape[0]], 8.0, tl.float32)
        if zeros is not None:
            zero = of_group(zeros, column, of_row, num_scales, GROUP)
        low, high = decode_int4(codes, zero[:, None], left, ASM)
    part = tl.dot(low, tl.trans(left), input_precision="ieee")
    if GROUP % BLOCK_K == 0:
        part = tl.dot(high, tl.trans(right), part, input_precision="ieee")
        acc += part * scale[:, None]
    else:
        # A group ends between the halves, so the second has a scale and a zero of its own.
        acc += part * scale[:, None]
        scale = of_group(scales, column + HALF, of_row, num_scales, GROUP)
        if zeros is not None:
            other = of_group(zeros, column + HALF, of_row, num_scales, GROUP)
            _, high = decode_int4(codes, other[:, None], left, ASM)
        acc += tl.dot(high, tl.trans(right), input_precision="ieee") * scale[:, None]
    return acc
