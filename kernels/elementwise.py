"""Norms, activations and rotary positions: the operations between the products of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import backend, check_head_dim, use_triton


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows / sqrt(mean(rows^2) + eps) * weight for each row, in float32, rounded once.

    Args:
        rows: [M, K] of any float dtype; copied first unless they are contiguous.
        weight: [K]. It may be read before the previous kernel has ended, so that kernel must not write it.
        eps: added to the mean of the squares.

    Returns:
        [M, K] of the dtype of `rows`.
    """
    if rows.dim() != 2 or weight.shape != rows.shape[1:]:
        raise ValueError(f"rms_norm of {tuple(rows.shape)} with a weight of {tuple(weight.shape)}")
    normed: Tensor = backend(rows, "elementwise").rms_norm(rows.contiguous(), weight, eps)
    return normed


def add_rms_norm(stream: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return stream + part, rounded once, and the sum's `rms_norm`, in one launch.

    Args:
        stream: [M, K], contiguous, of any float dtype; `part` likewise.
        weight: [K]; see `rms_norm`, also for `eps`.

    Returns:
        (sum, its norm), [M, K] each, of the dtype of `stream`.
    """
    if stream.dim() != 2 or weight.shape != stream.shape[1:] or part.shape != stream.shape:
        raise ValueError(f"{tuple(stream.shape)} plus {tuple(part.shape)} with a norm of {tuple(weight.shape)}")
    found: tuple[Tensor, Tensor] = backend(stream, "elementwise").add_rms_norm(stream, part, weight, eps)
    return found


def norm_pairs(
    table: Tensor, token_ids: Tensor, token_weight: Tensor, stream: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Return the `rms_norm` of each token's embedding, and beside it that of its row of `stream`. One launch.

    Args:
        table: [V, K], embeddings, contiguous, of any float dtype.
        token_ids: int32 or int64 [M], each in [0, V).
        token_weight: [K], of the norm of embeddings; `weight` [K] is that of the norm of `stream`. See `rms_norm`, also
            for `eps`.
        stream: [M, K] of the dtype of `table`; copied first unless it is contiguous.

    Returns:
        [M, 2K] of that dtype.
    """
    size = table.shape[1]
    if stream.shape != (token_ids.shape[0], size) or token_weight.shape != (size,) or weight.shape != (size,):
        raise ValueError(
            f"norm_pairs of {tuple(stream.shape)} beside {token_ids.shape[0]} embeddings of {size} with weights of "
            f"{tuple(token_weight.shape)} and {tuple(weight.shape)}"
        )
    pairs = stream.new_empty(stream.shape[0], 2 * size)
    backend(stream, "elementwise").norm_pairs(table, token_ids, token_weight, stream.contiguous(), weight, eps, pairs)
    return pairs


def gate_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """Return silu(gate) * up in float32, rounded once: [M, 2F] (gate first, contiguous) to [M, F] of the same dtype.

    With `gelu`, use gelu(gate), approximated by tanh, instead of silu(gate).
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_mul of {tuple(gate_up.shape)}")
    product: Tensor = backend(gate_up, "elementwise").gate_mul(gate_up, gelu)
    return product


def recur(joint: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a step of a recurrent cell in float32, rounded once. One launch.

    Args:
        joint: [M, 3R], contiguous: keep gate, new values and output, before their activations.
        memory: [M, R], rows may be strided.

    Returns:
        the output, tanh(output), and the new memory, sigmoid(keep) * memory + (1 - sigmoid(keep)) * tanh(new), each
        [M, R] in the dtype of `joint`.
    """
    if joint.shape != (memory.shape[0], 3 * memory.shape[1]) or not joint.is_contiguous() or memory.stride(1) != 1:
        raise ValueError(f"a cell of {list(joint.shape)} with a memory of {list(memory.shape)}")
    found: tuple[Tensor, Tensor] = backend(joint, "elementwise").recur(joint, memory)
    return found


def rotary_angles(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions [M] times `inv_freq` [D / 2], multiplied by `scale`; float32 [M, D / 2] each.

    Pairs of frequency 0 are neither rotated nor scaled.
    """
    angles: tuple[Tensor, Tensor] = backend(positions, "elementwise").rotary_angles(positions, inv_freq, scale)
    return angles


def rope_write(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate query and key heads, and write keys and values to their slots. One launch.

    Pairs are (i, i + D / 2). All arithmetic is float32, with one rounding at the end.

    Args:
        heads: [M, H + 2 * KVH, D], query, then key, then value heads, contiguous; D a power of two, at least 16.
        cos: float32 [M, D / 2]; `sin` likewise.
        slots: int32 [M]; k and v of a token whose slot is -1 are not written.
        k_cache: [S, KVH, D] of the heads' dtype or float8_e4m3fn, which clamps larger values to its range; contiguous,
            written; `v_cache` likewise.
        num_heads: H.
        qk_norm: [H + KVH, D], weights of an RMS norm over each query and key head before rotation.
        eps: added to the mean square.

    Returns:
        q [M, H, D] in the heads' dtype.
    """
    kv_heads, dim = k_cache.shape[1:]
    _check_write(heads, k_cache, v_cache, num_heads, qk_norm, (num_heads + kv_heads, dim))
    q = torch.empty(heads.shape[0], num_heads, dim, dtype=heads.dtype, device=heads.device)
    backend(heads, "elementwise").rope_write(heads, cos, sin, slots, k_cache, v_cache, qk_norm, eps, q)
    return q


def write_keys(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate keys, and write keys and values to their slots, in L layers. One launch. For the rest see `rope_write`.

    Args:
        heads: [M, L, 2 * KVH, D], for each layer key, then value heads; contiguous.
        slots: int [M], the same in all layers.
        k_cache: [L, S, KVH, D]; `v_cache` likewise.
        k_norm: [L, KVH, D], weights of an RMS norm over each key head before rotation.
    """
    layers, _, kv_heads, dim = k_cache.shape
    if heads.shape[1] != layers:
        raise ValueError(f"heads of {heads.shape[1]} layers for {layers}")
    _check_write(heads, k_cache, v_cache, 0, k_norm, (layers, kv_heads, dim))
    backend(heads, "elementwise").write_keys(heads, cos, sin, slots, k_cache, v_cache, k_norm, eps)


def _check_write(
    heads: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    norm: Tensor | None,
    norm_shape: tuple[int, ...],
) -> None:
    kv_heads, dim = k_cache.shape[-2:]
    if heads.shape[-2:] != (num_heads + 2 * kv_heads, dim) or v_cache.shape != k_cache.shape:
        raise ValueError(f"{num_heads} query heads, heads {list(heads.shape)}, a cache of {list(k_cache.shape)}")
    if use_triton(heads):
        check_head_dim(dim)
    if not (heads.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("heads and caches must be contiguous")
    if norm is not None and (norm.shape != norm_shape or not norm.is_contiguous()):
        raise ValueError(f"norm weights must be contiguous {list(norm_shape)}, got {list(norm.shape)}")
