"""Products with weights: for few rows, bound by reading the weights or by latency, and for more rows in fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import ceil_div, check_head_dim, has_wgmma, num_processors, use_triton
from kernels.linear_configs import (
    MAX_CUT_SIZE,
    MAX_QUANTIZED_ROWS,
    MAX_ROWS,
    MAX_SIZE,
    GemmConfig,
    RowConfig,
    choose_config,
    fits_row_kernel,
    qkv_config,
    quantized_config,
    row_config,
)
from kernels.quant_weight import MAX_PIECE, QuantWeight
from kernels.reference import linear as reference
from kernels.ring_configs import RING_WEIGHTS, RingConfig, choose_ring

MAX_FP8_ROWS = 512
"""Most rows for which `fp8_linear` pays, where one launch of `stream_linear` does not suffice. For 512 rows, a layer's
products at 8B shape take an H200 383 us, and 477 us with dequantized weights; for 1,024 rows 759 and 755."""
PARTS_TILE = 128
"""`fp8_linear` pads the parts that it gives the library to a multiple of this; results of the padding are never read.
Gate and up of an 8B model take an H200 82, 68 and 55 us for 130, 192 and 256 parts, and 107 and 80 us for 258 and
384."""


def stream_linear(
    rows: Tensor,
    weight: Tensor | QuantWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: GemmConfig | RingConfig | None = None,
) -> Tensor:
    """Return rows @ weight^T for few rows, fused with the operations around a product in a transformer layer.

    In order: the product is accumulated in float32; bias added; silu(gate) * up if gated; residual added; rounded once
    to `out_dtype`.

    Row r of the result depends only on row r of `rows`, not on r or M, as long as `config` and
    linear_configs.tile_rows(M) stay the same. Results are deterministic. With quantized weights, more than MAX_ROWS
    rows are multiplied MAX_ROWS at a time: a launch for more would run out of registers. On one device, calls must be
    in stream order, since programs that share a tile use one scratch buffer. The buffer grows only outside of CUDA
    graph capture, so run each shape once before capturing it. Weights may be read before the previous launch has ended,
    so that launch must not write them.

    Args:
        rows: [M, K], contiguous, 1 <= M <= MAX_ROWS, or MAX_QUANTIZED_ROWS for quantized weights; bfloat16, float16 or
            float32.
        weight: [N, K], contiguous, of the same dtype, or quantized; [2F, K] if gated (gate rows, then up rows).
            Quantized weights are exact in bfloat16 except for their scales, which are applied to sums in float32.
        bias: [N] or None ([2F] if gated).
        residual: [M, N] or None ([M, F] if gated), contiguous. It may be `out`.
        gated: the result is silu(gate) * up, [M, F].
        out_dtype: dtype of the result; that of `rows` if None.
        out: [M, N or F] of `out_dtype`, contiguous, written and returned; a new tensor if None.
        config: how to cut the work; chosen by shape if None.
    """
    num_out = _weight_shape(weight)[0] // (2 if gated else 1)
    dtype = out_dtype if out_dtype is not None else rows.dtype if out is None else out.dtype
    _check_stream(rows, weight, num_out, gated, bias, residual, out, dtype)
    if not use_triton(rows):
        result = reference.stream_linear(rows, weight, bias, residual, gated, dtype)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(rows.shape[0], num_out, dtype=dtype, device=rows.device)
    if rows.shape[0] > MAX_ROWS:
        for first in range(0, rows.shape[0], MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            added = None if residual is None else residual[part]
            stream_linear(rows[part], weight, bias=bias, residual=added, gated=gated, out=out[part], config=config)
        return out
    config = config or stream_config(rows, weight, gated)
    if isinstance(config, RingConfig):
        from kernels.jit.ring_gemm import ring_linear

        ring_linear(rows, weight, bias, residual, gated, out, config)
    else:
        from kernels.jit import gemm as jit

        jit.stream_linear(rows, weight, bias, residual, gated, out, config)
    return out


def fits_ring(weight: Tensor | QuantWeight) -> bool:
    """Whether there is a RingConfig for weights of this layout."""
    if not isinstance(weight, QuantWeight):
        return True
    # Steps of 128 or 256 columns must lie in one group, or in two.
    groups_fit = weight.group in (128, weight.size) or weight.group % 256 == 0
    return weight.kind in ("fp8", "int4") and weight.piece == MAX_PIECE and groups_fit


def ring_pays(weight: QuantWeight, dtype: torch.dtype) -> bool:
    """Whether rings are used for few rows of `dtype`, and are faster than humming-kernels 0.1.19 for up to 64 rows.

    Rounds of up to 64 tokens of an 8B model take an H100 0.86 to 0.94 of that library's time, in int4 and in fp8 blocks
    (benchmarks/results/engine_quantized_rings_library_h100.json). Small matrices, which use our rings if the library is
    missing, were not compared with it.
    """
    large = weight.num_out * weight.size >= RING_WEIGHTS
    return large and dtype == torch.bfloat16 and has_wgmma(weight.codes) and fits_ring(weight)


def stream_config(rows: Tensor, weight: Tensor | QuantWeight, gated: bool = False) -> GemmConfig | RingConfig:
    """Return how `stream_linear` cuts its work by default."""
    num_out, size = _weight_shape(weight)[0] // (2 if gated else 1), rows.shape[1]
    processors, bits, grouped = num_processors(rows), 16, False
    if isinstance(weight, QuantWeight):
        bits, grouped = 16 // weight.per_word, weight.group != size or weight.zeros is not None
    if rows.dtype == torch.bfloat16 and has_wgmma(rows) and fits_ring(weight):
        config = choose_ring(num_out, size, rows.shape[0], gated, processors, bits, grouped)
        if config is not None:
            return config
    sizes = (num_out, size, rows.shape[0], gated, rows.element_size(), processors)
    return (
        quantized_config(*sizes, weight.kind, weight.piece)
        if isinstance(weight, QuantWeight)
        else choose_config(*sizes)
    )


def dequantize(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    """Return the weights [num_out, size] in `dtype`, computed in float32 and rounded once, for products with many rows.

    On a GPU, raises ValueError for a weight that does not stream.
    """
    if not use_triton(weight.codes):
        return weight.dequantized(dtype)
    weight.check_streams()
    from kernels.jit import gemm as jit

    out = torch.empty(weight.num_out, weight.size, dtype=dtype, device=weight.codes.device)
    jit.dequantize(weight, out)
    return out


def _check_stream(
    rows: Tensor,
    weight: Tensor | QuantWeight,
    num_out: int,
    gated: bool,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    dtype: torch.dtype,
) -> None:
    _check_product(rows, weight)
    most, num_rows = MAX_ROWS, _weight_shape(weight)[0]
    if isinstance(weight, QuantWeight):
        most = MAX_QUANTIZED_ROWS
        weight.check_streams()
    if not 1 <= rows.shape[0] <= most:
        raise ValueError(f"{rows.shape[0]} rows; stream_linear takes 1 to {most}")
    if gated and num_rows % 2:
        raise ValueError(f"{num_rows} weight rows cannot be halved into gate and up")
    shape = (rows.shape[0], num_out)
    wanted = {"bias": (num_rows,), "residual": shape, "out": shape}
    given = {"bias": bias, "residual": residual, "out": out}
    for name, tensor in given.items():
        if tensor is not None and tuple(tensor.shape) != tuple(wanted[name]):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {tuple(wanted[name])}")
    if out is not None and out.dtype != dtype:
        raise ValueError(f"out is {out.dtype}, not {dtype}")
    codes = weight.codes if isinstance(weight, QuantWeight) else weight
    contiguous = [rows, codes, *(tensor for tensor in given.values() if tensor is not None)]
    if not all(tensor.is_contiguous() for tensor in contiguous):
        raise ValueError("stream_linear takes contiguous tensors")


def norm_linear(
    rows: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    config: RowConfig | None = None,
) -> Tensor:
    """Return rms_norm(rows) @ weight^T in one launch, for few rows that are not wide.

    In order: the norm's weight, rounded to the dtype of `rows`; the product, accumulated in float32; the norm's scale
    of the row (for float16, whose range unscaled rows may exceed, it is applied with the weight); bias; silu(gate) * up
    if gated; residual; one rounding. Weights are read before the previous launch has ended. A row of the result depends
    only on that row and on `config`.

    Args:
        rows: [M, K], contiguous, M and K within the limits of `fits_row_kernel`; bfloat16, float16 or float32.
        weight: [N, K], contiguous, of the same dtype; [2F, K] if gated (gate rows, then up rows).
        norm: [K], the norm's weight; rows are not normed if None.
        eps: added to the mean of the squares.

    For `bias`, `residual`, `gated` and `config` see `stream_linear`.

    Returns:
        [M, N or F] of the dtype of `rows`.
    """
    num_out = weight.shape[0] // (2 if gated else 1)
    whole = norm is not None or gated
    _check_rows(rows, weight, norm, bias, whole)
    shape = (rows.shape[0], num_out)
    if residual is not None and (residual.shape != shape or not residual.is_contiguous()):
        raise ValueError(f"residual is {tuple(residual.shape)}, not a contiguous {shape}")
    if not use_triton(rows):
        return reference.norm_linear(rows, weight, norm, eps, bias, residual, gated)
    from kernels.jit import row_linear as jit

    out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    config = config or row_config(rows.shape[0], num_out, rows.shape[1], whole)
    jit.norm_linear(rows, weight, norm, eps, bias, residual, gated, out, config)
    return out


def norm_qkv(
    rows: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    qk_norm: Tensor | None = None,
    qk_eps: float = 0.0,
) -> Tensor:
    """Compute query, key and value heads of rms_norm(rows), rotate them and write keys and values to their slots.

    One launch. Equivalent to `norm_linear` followed by kernels.elementwise.rope_write, without the rounding between
    them.

    Args:
        rows: [M, K]; see `norm_linear`, also for `norm`, `eps` and `bias` (of H + 2 * KVH heads).
        weight: [(H + 2 * KVH) * D, K], query, then key, then value heads; D a power of two, at least 16.
        cos: float32 [M, D / 2]; `sin` likewise.
        slots: int32 [M]; k and v of a token whose slot is -1 are not written.
        k_cache: [S, KVH, D] of the rows' dtype, contiguous, written; `v_cache` likewise.
        num_heads: H.
        qk_norm: [H + KVH, D], weights of an RMS norm over each query and key head before rotation, with `qk_eps`.

    Returns:
        q [M, H, D] in the rows' dtype.
    """
    kv_heads, dim = k_cache.shape[1:]
    _check_rows(rows, weight, norm, bias, whole=True)
    if weight.shape[0] != (num_heads + 2 * kv_heads) * dim or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"{weight.shape[0]} weight rows for {num_heads} query heads and a cache of {list(k_cache.shape)}"
        )
    check_head_dim(dim)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or k_cache.dtype != rows.dtype:
        raise ValueError(f"caches must be contiguous and of {rows.dtype}")
    angles = (rows.shape[0], dim // 2)
    if cos.shape != angles or sin.shape != angles or slots.shape != rows.shape[:1]:
        raise ValueError(f"angles of {list(cos.shape)} and {slots.numel()} slots for {rows.shape[0]} rows")
    if qk_norm is not None and (qk_norm.shape != (num_heads + kv_heads, dim) or not qk_norm.is_contiguous()):
        raise ValueError(f"norm weights must be contiguous [{num_heads + kv_heads}, {dim}], got {list(qk_norm.shape)}")
    q = torch.empty(rows.shape[0], num_heads, dim, dtype=rows.dtype, device=rows.device)
    where = (cos, sin, slots, k_cache, v_cache)
    if not use_triton(rows):
        reference.norm_qkv(rows, weight, *where, norm, eps, bias, qk_norm, qk_eps, q)
        return q
    from kernels.jit import row_linear as jit

    config = qkv_config(rows.shape[1], dim, qk_norm is not None)
    jit.norm_qkv(rows, weight, *where, norm, eps, bias, qk_norm, qk_eps, q, config)
    return q


def _check_rows(rows: Tensor, weight: Tensor, norm: Tensor | None, bias: Tensor | None, whole: bool) -> None:
    _check_product(rows, weight)
    if norm is not None and norm.shape != rows.shape[1:]:
        raise ValueError(f"a norm of {tuple(norm.shape)} for rows of {rows.shape[1]}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias of {tuple(bias.shape)} for {weight.shape[0]} weight rows")
    count, size = rows.shape
    if not fits_row_kernel(count, size, whole=whole):
        limit = MAX_SIZE if whole else MAX_CUT_SIZE
        raise ValueError(f"{tuple(rows.shape)} rows; 1 to {MAX_ROWS} of 16 to {limit} columns can be taken")
    if not (rows.is_contiguous() and weight.is_contiguous()):
        raise ValueError("rows and weights must be contiguous")


def _check_product(rows: Tensor, weight: Tensor | QuantWeight) -> None:
    shape, dtype = _weight_shape(weight), rows.dtype if isinstance(weight, QuantWeight) else weight.dtype
    if rows.dim() != 2 or len(shape) != 2 or rows.shape[1] != shape[1] or rows.dtype != dtype:
        raise ValueError(f"product of {rows.dtype} {tuple(rows.shape)} with weights {dtype} {shape}")


def _weight_shape(weight: Tensor | QuantWeight) -> tuple[int, ...]:
    return (weight.num_out, weight.size) if isinstance(weight, QuantWeight) else tuple(weight.shape)


def fits_fp8_linear(weight: QuantWeight, dtype: torch.dtype) -> bool:
    """Whether `fp8_linear` takes this weight and rows of `dtype`: on Hopper, with one scale a weight row."""
    if weight.kind != "fp8" or weight.group != weight.size or weight.span > 1 or dtype != torch.bfloat16:
        return False
    if weight.size % 16 or weight.num_out % 16:
        return False
    # Some later GPUs reject products with one scale a row (pytorch issue 192707).
    return has_wgmma(weight.codes)


def fp8_linear(
    rows: Tensor,
    weight: QuantWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    rounds_rows: bool = False,
) -> Tensor:
    """Return rows @ weight^T like `stream_linear` with the same arguments, for any number of rows in bfloat16.

    A bfloat16 number has eight significant bits, an e4m3 number four. So a row is split into the sum of two rows in
    e4m3, and its product is the sum of their products by the fp8 instructions of the tensor cores: the weights are read
    once, without conversion. A row's parts are exact for all numbers that are at least 2^-13 of its largest; smaller
    ones are off by 2^-21 of the largest. The two products are rounded to bfloat16 before they are added in float32. The
    library that multiplies them does not document what a row's result depends on.

    `rounds_rows`: the larger part of a row stands for all of it, at half of the work.
    """
    num_out = weight.num_out // (2 if gated else 1)
    shape = (rows.shape[0], num_out)
    if rows.dim() != 2 or rows.shape[1] != weight.size or not rows.is_contiguous():
        raise ValueError(f"fp8_linear takes contiguous rows [M, {weight.size}], got {list(rows.shape)}")
    if residual is not None and (residual.shape != shape or not residual.is_contiguous()):
        raise ValueError(f"residual is {list(residual.shape)}, not a contiguous {list(shape)}")
    dtype = out_dtype or rows.dtype
    if not use_triton(rows):
        return reference.stream_linear(rows, weight, bias, residual, gated, dtype)
    from kernels.jit import gemm as jit

    num_parts = ceil_div(rows.shape[0] * (1 if rounds_rows else 2), PARTS_TILE) * PARTS_TILE
    parts = rows.new_empty(num_parts, weight.size, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(num_parts, 1, dtype=torch.float32)
    jit.split(rows, weight.piece, parts, scales, rounds=rounds_rows)
    codes = weight.codes.view(torch.float8_e4m3fn)
    products = torch._scaled_mm(parts, codes.T, scale_a=scales, scale_b=weight.scales, out_dtype=torch.bfloat16)
    if rounds_rows and bias is None and residual is None and not gated and dtype == products.dtype:
        return products[: rows.shape[0]]
    out = rows.new_empty(shape, dtype=dtype)
    jit.join(products, bias, residual, gated, out, rounded=rounds_rows)
    return out
