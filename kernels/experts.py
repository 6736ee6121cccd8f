"""Mixtures of experts: choose experts for each token, and multiply its row by the weights of each of them.

Everything happens on the device, in shapes that depend only on the number of tokens, so it can be captured in a CUDA
graph. A pair is a token and one of its experts: pair t * K + k is token t with the k-th of its K experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.expert_tiles import MAX_EXPERTS, Gating, Routes, tile_of
from kernels.launch import backend, use_triton
from kernels.quant_weight import QuantWeight


def route(logits: Tensor, num_active: int, normed: bool, slots: Tensor | None = None, tile: int = 0) -> Routes:
    """Choose the `num_active` experts with the largest logits for each token, and lay out their pairs for products.

    Weights are the softmax over all experts' logits or, if `normed`, over the logits of the chosen experts. Among equal
    logits the lower expert number comes first; NaN counts as the lowest logit.

    Args:
        logits: float32 [M, E], contiguous; E at most MAX_EXPERTS.
        num_active: K, 1 to E.
        normed: whether a token's weights add up to one.
        slots: int32 [M]; tokens whose slot is negative are padding and get no expert.
        tile: places in a tile; 0 for the default size (`tile_of`).
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"route takes contiguous float32 logits [M, E], got {logits.dtype} {list(logits.shape)}")
    num_tokens, num_experts = logits.shape
    if not 1 <= num_active <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"{num_active} of {num_experts} experts; 1 to all of at most {MAX_EXPERTS} can be chosen")
    if slots is not None and slots.shape != (num_tokens,):
        raise ValueError(f"{list(slots.shape)} slots for {num_tokens} tokens")
    tile = tile or tile_of(num_tokens, num_active, num_experts)
    routes: Routes = backend(logits, "experts").route(logits, num_active, normed, slots, tile)
    return routes


def in_tiles(routes: Routes, num_experts: int, tile: int) -> Routes:
    """Return the same routes laid out in tiles of `tile` places."""
    from kernels.jit import experts as jit

    return jit.in_tiles(routes, num_experts, tile)


def gate(gate_up: Tensor, gating: Gating, interleaved: bool) -> Tensor:
    """Apply `gating` to gate and up [P, 2F] in float32, rounded once: [P, F] of the same dtype. See `expert_linear`."""
    gated: Tensor = backend(gate_up, "experts").gate(gate_up, gating, interleaved)
    return gated


def expert_linear(
    rows: Tensor,
    weight: Tensor | QuantWeight,
    routes: Routes,
    *,
    bias: Tensor | None = None,
    gating: Gating | None = None,
    interleaved: bool = False,
) -> Tensor:
    """For each pair, compute its row @ weight[expert]^T + bias[expert], accumulated in float32 and rounded once.

    The result of a pair depends only on its row, its expert and M.

    Args:
        rows: [M, I], one row a token, or [M * K, I], one row a pair; contiguous, of any float dtype.
        weight: [E, O, I], contiguous, of the same dtype, or a QuantWeight whose tensors have a leading dimension E;
            [E, 2F, I] with `gating`.
        routes: as `route` returned them.
        bias: [E, O] or None, contiguous.
        gating: the product holds gate and up, and the result is their gating, [M * K, F].
        interleaved: gate and up rows alternate, gate first; otherwise all gate rows come before all up rows.

    Returns:
        [M * K, O or F] in the dtype of `rows`; rows of padding pairs are undefined.
    """
    num_tokens, num_active = routes.experts.shape
    if isinstance(weight, QuantWeight):
        shape, dtype = (*weight.codes.shape[:-1], weight.size), rows.dtype
    else:
        shape, dtype = tuple(weight.shape), weight.dtype
    if len(shape) != 3 or rows.dim() != 2 or rows.shape[1] != shape[2] or rows.dtype != dtype:
        raise ValueError(f"product of {rows.dtype} {list(rows.shape)} with experts {dtype} {list(shape)}")
    if rows.shape[0] not in (num_tokens, num_tokens * num_active):
        raise ValueError(f"{rows.shape[0]} rows for {num_tokens} tokens of {num_active} experts each")
    if bias is not None and tuple(bias.shape) != shape[:2]:
        raise ValueError(f"a bias of {list(bias.shape)} for experts of {list(shape)}")
    if gating is not None and shape[1] % 2:
        raise ValueError(f"{shape[1]} weight rows cannot be halved into gate and up")
    parts = (weight.codes, weight.scales, weight.zeros) if isinstance(weight, QuantWeight) else (weight,)
    if not all(tensor.is_contiguous() for tensor in (rows, bias, *parts) if tensor is not None):
        raise ValueError("expert_linear takes contiguous tensors")
    if use_triton(rows) and isinstance(weight, QuantWeight):
        weight.check_streams()
    pairs: Tensor = backend(rows, "experts").expert_linear(rows, weight, routes, bias, gating, interleaved)
    return pairs


def combine(pairs: Tensor, routes: Routes, residual: Tensor) -> Tensor:
    """Return residual [M, H] plus the weighted sum of each token's pairs [M * K, H], in float32, rounded once."""
    num_tokens, num_active = routes.experts.shape
    wanted = (num_tokens * num_active, residual.shape[-1])
    if pairs.shape != wanted or residual.shape[0] != num_tokens or pairs.dtype != residual.dtype:
        raise ValueError(f"pairs {list(pairs.shape)} for a residual {list(residual.shape)}; expected {list(wanted)}")
    if not (pairs.is_contiguous() and residual.is_contiguous()):
        raise ValueError("combine takes contiguous tensors")
    total: Tensor = backend(pairs, "experts").combine(pairs, routes, residual)
    return total
