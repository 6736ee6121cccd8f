"""Weights of eight and four bits (kernels.quant_weight) in registers, as the kernels that multiply them have them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decode_fp8(words):
    """Both codes of words, in bfloat16."""
    # Sign left and the rest right by four, at the tops of lanes, is the value times 2^-120.
    return tl.inline_asm_elementwise(
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
        }""",
        "=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _decode_int4(words, zero):
    """The four codes of words less `zero` [weight rows, 1], in bfloat16."""
    # A nibble in the last bits of 128 is 128 more, exactly.
    return tl.inline_asm_elementwise(
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
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, (zero + tl.full([1, 1], 128.0, tl.float32)).to(tl.bfloat16)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _decode_mxfp4(words, first, second, third, fourth):
    """The four codes of words, e2m1, in bfloat16: by 2^120 times their scales, which are [weight rows, 1]."""
    # Exponent and mantissa at the place of bfloat16's are the value times 2^-126.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, t;
        shl.b32 s, $4, 12;
        shl.b32 t, $4, 6;
        and.b32 t, t, 0x01c001c0;
        lop3.b32 s, s, 0x80008000, t, 0xea;
        mul.bf16x2 $0, s, $5;
        shl.b32 s, $4, 8;
        shl.b32 t, $4, 2;
        and.b32 t, t, 0x01c001c0;
        lop3.b32 s, s, 0x80008000, t, 0xea;
        mul.bf16x2 $1, s, $6;
        shl.b32 s, $4, 4;
        shr.b32 t, $4, 2;
        and.b32 t, t, 0x01c001c0;
        lop3.b32 s, s, 0x80008000, t, 0xea;
        mul.bf16x2 $2, s, $7;
        shr.b32 t, $4, 6;
        and.b32 t, t, 0x01c001c0;
        lop3.b32 s, $4, 0x80008000, t, 0xea;
        mul.bf16x2 $3, s, $8;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [words, first, second, third, fourth],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def code_values(words, PART: tl.constexpr, KIND: tl.constexpr):
    """Values of the words' codes number PART, float32; an int4's is 0 to 15."""
    if KIND == "fp8":
        codes = ((words >> (8 * PART)) & 255).to(tl.uint8)
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        codes = (words >> (4 * PART)) & 15
        values = codes.to(tl.float32)
        if KIND == "mxfp4":
            magnitude = (codes & 7).to(tl.float32)
            # 0, 0.5, 1, 1.5, 2, 3, 4, 6: halves up to three, then twice as far apart, and again.
            far = tl.where(magnitude < 6, magnitude - 2.0, 2.0 * magnitude - 8.0)
            values = tl.where(magnitude < 4, magnitude * 0.5, far)
            values = tl.where(codes >= 8, -values, values)
    return values


@triton.jit
def load_words(weight, row, step, steps, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """A piece's words of weight rows, [weight rows, DEPTH]; a row has `steps` pieces."""
    start = (row // TILE).to(tl.int64) * steps + step
    places = (start * TILE + row % TILE)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    # Weights leave L2 first: they are read once a round, rows and partial sums several times.
    return tl.load(weight + places, eviction_policy="evict_first")


@triton.jit
def _joined(first, second, third, fourth):
    """Four tiles [rows, depth] beside each other."""
    # They stay where they are: what is moved about are names of registers.
    joined = tl.permute(tl.join(tl.join(first, second), tl.join(third, fourth)), (0, 3, 2, 1))
    return tl.reshape(joined, [first.shape[0], 4 * first.shape[1]])


@triton.jit
def mx_exponent(exponents, column, PART: tl.constexpr, DEPTH: tl.constexpr):
    """Of the group that a piece's part lies in, int32; `exponents` are those of the groups around `column`."""
    return (exponents >> ((column // 32 % 4 + PART * DEPTH // 32) * 8)) & 255


@triton.jit
def _mx_scale(exponents, column, PART: tl.constexpr, DEPTH: tl.constexpr, BIAS: tl.constexpr):
    """2^BIAS times a part's scale, bfloat16."""
    exponent = mx_exponent(exponents, column, PART, DEPTH)
    return ((exponent + BIAS) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _add_mxfp4(acc, words, factors, exponents, column, ASM: tl.constexpr):
    DEPTH: tl.constexpr = words.shape[1]
    FACTOR: tl.constexpr = 64.0 if ASM else 1.0
    if ASM:
        first, second, third, fourth = _decode_mxfp4(
            words, _mx_scale(exponents, column, 0, DEPTH, 120), _mx_scale(exponents, column, 1, DEPTH, 120),
            _mx_scale(exponents, column, 2, DEPTH, 120), _mx_scale(exponents, column, 3, DEPTH, 120),
        )  # fmt: skip
    else:
        first = (code_values(words, 0, "mxfp4") * mx_scale(exponents, column, 0, DEPTH)).to(factors.dtype)
        second = (code_values(words, 1, "mxfp4") * mx_scale(exponents, column, 1, DEPTH)).to(factors.dtype)
        third = (code_values(words, 2, "mxfp4") * mx_scale(exponents, column, 2, DEPTH)).to(factors.dtype)
        fourth = (code_values(words, 3, "mxfp4") * mx_scale(exponents, column, 3, DEPTH)).to(factors.dtype)
    part = tl.dot(_joined(first, second, third, fourth), tl.trans(factors), input_precision="ieee")
    return acc + part * FACTOR


@triton.jit
def mx_scale(exponents, column, PART: tl.constexpr, DEPTH: tl.constexpr):
    """A part's scale, float32."""
    return (mx_exponent(exponents, column, PART, DEPTH) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_and_zero(table, KIND: tl.constexpr):
    """Those of weight rows, float32, of what the table of scales has for them."""
    scale, zero = table.to(tl.float32), 8.0 if KIND == "int4" else 0.0
    if table.dtype == tl.int32:
        scale, zero = (table & -16).to(tl.float32, bitcast=True), (table & 15).to(tl.float32)
    return scale, zero


@triton.jit
def of_group(scales, column, of_row, num_scales, KIND: tl.constexpr, GROUP: tl.constexpr):
    """What the table of scales has for weight rows and the group, or groups, of `column`, [weight rows, 1]."""
    SPAN: tl.constexpr = 128 if KIND == "mxfp4" else GROUP
    return tl.load(scales + tl.cast(column // SPAN, tl.int64) * num_scales + of_row)[:, None]


@triton.jit
def add_words(
    acc, words, factors, scales, of_row, column, num_scales, KIND: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr
):
    """acc [weight rows, rows] plus the product of a piece of columns, from `column` on.

    `words` [weight rows, depth] and `factors` [rows, piece] are those of the piece; `of_row` [weight rows] is where
    rows have their scales.
    """
    table = of_group(scales, column, of_row, num_scales, KIND, GROUP)
    if KIND == "mxfp4":
        acc = _add_mxfp4(acc, words, factors, table, column, ASM)
    else:
        scale, zero = scale_and_zero(table, KIND)
        if KIND == "fp8":
            if ASM:
                first, second = _decode_fp8(words)
            else:
                first = code_values(words, 0, KIND).to(factors.dtype)
                second = code_values(words, 1, KIND).to(factors.dtype)
            joined = tl.permute(tl.join(first, second), (0, 2, 1))
            weights = tl.reshape(joined, [words.shape[0], 2 * words.shape[1]])
        else:
            if ASM:
                first, second, third, fourth = _decode_int4(words, zero)
            else:
                first = (code_values(words, 0, KIND) - zero).to(factors.dtype)
                second = (code_values(words, 1, KIND) - zero).to(factors.dtype)
                third = (code_values(words, 2, KIND) - zero).to(factors.dtype)
                fourth = (code_values(words, 3, KIND) - zero).to(factors.dtype)
            weights = _joined(first, second, third, fourth)
        # Scaled, and so not added up within the product: there its instructions would wait for each other.
        acc += tl.dot(weights, tl.trans(factors), input_precision="ieee") * scale
    return acc
