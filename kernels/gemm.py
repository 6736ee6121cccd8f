"""Products with few rows, bound by the reading of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gemm_configs import MAX_ROWS, GemmConfig, choose_config
from kernels.launch import num_processors, use_triton
from kernels.reference import gemm as reference


def stream_linear(
    rows: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """rows @ weight^T for up to MAX_ROWS rows, with what stands around a product in a transformer layer.

    In order: the product is accumulated in float32; bias added; silu(gate) * up where gated; residual added; rounded
    once to `out_dtype`.

    Row r of the result depends on row r of `rows` alone, not on r and not on M, as long as `config` and
    gemm_configs.tile_rows(M) stay the same. Results are deterministic. On one device, calls must follow each other in
    stream order: programs that share a tile meet in one scratch buffer. That buffer grows outside of CUDA graph
    capture only, so run each shape once before it is captured.

    Args:
        rows: [M, K], contiguous, 1 <= M <= MAX_ROWS; bfloat16, float16 or float32.
        weight: [N, K], contiguous, of the same dtype; [2F, K] if gated (gate rows, then up rows).
        bias: [N] or None ([2F] if gated).
        residual: [M, N] or None ([M, F] if gated), contiguous. It may be `out`.
        gated: the result is silu(gate) * up, [M, F].
        out_dtype: dtype of the result; that of `rows` if None.
        out: [M, N or F] of `out_dtype`, contiguous, written and returned; a new tensor if None.
        config: how to cut the work; chosen by shape if None.

    Raises:
        ValueError: more rows than MAX_ROWS, or the shapes or dtypes do not fit.
    """
    num_out = weight.shape[0] // (2 if gated else 1)
    dtype = out_dtype if out_dtype is not None else rows.dtype if out is None else out.dtype
    _check(rows, weight, num_out, gated, bias, residual, out, dtype)
    if not use_triton(rows):
        result = reference.stream_linear(rows, weight, bias, residual, gated, dtype)
        return result if out is None else out.copy_(result)
    from kernels.jit import gemm

    if out is None:
        out = torch.empty(rows.shape[0], num_out, dtype=dtype, device=rows.device)
    if config is None:
        size, itemsize = rows.shape[1], rows.element_size()
        config = choose_config(num_out, size, rows.shape[0], gated, itemsize, num_processors(rows))
    gemm.stream_linear(rows, weight, bias, residual, gated, out, config)
    return out


def _check(
    rows: Tensor,
    weight: Tensor,
    num_out: int,
    gated: bool,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    dtype: torch.dtype,
) -> None:
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1] or rows.dtype != weight.dtype:
        raise ValueError(
            f"product of {rows.dtype} {tuple(rows.shape)} with weights {weight.dtype} {tuple(weight.shape)}"
        )
    if not 1 <= rows.shape[0] <= MAX_ROWS:
        raise ValueError(f"{rows.shape[0]} rows; stream_linear takes 1 to {MAX_ROWS}")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"{weight.shape[0]} weight rows cannot be halved into gate and up")
    shape = (rows.shape[0], num_out)
    wanted = {"bias": weight.shape[:1], "residual": shape, "out": shape}
    given = {"bias": bias, "residual": residual, "out": out}
    for name, tensor in given.items():
        if tensor is not None and tuple(tensor.shape) != tuple(wanted[name]):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {tuple(wanted[name])}")
    if out is not None and out.dtype != dtype:
        raise ValueError(f"out is {out.dtype}, not {dtype}")
    contiguous = [rows, weight, *(tensor for tensor in given.values() if tensor is not None)]
    if not all(tensor.is_contiguous() for tensor in contiguous):
        raise ValueError("stream_linear takes contiguous tensors")
