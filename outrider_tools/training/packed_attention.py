"""Attention over sequences that lie one after the other: the target's, and a drafter's on its own features.

As in `attention`, a step's query sees the true keys of its sequence up to its own position, and its own column of the
later steps. The true part is flash attention; the few own keys are merged into it by the logarithm of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the sequences of M tokens lie.

    Attributes:
        bounds: int32 [S + 1], from 0 to M; sequence s is bounds[s] to bounds[s + 1] - 1, and may be empty.
        positions: int64 [M], of each token in its sequence.
        longest: tokens of a sequence at most.
    """

    bounds: Tensor
    positions: Tensor
    longest: int

    @classmethod
    def of(cls, bounds: Tensor, num_tokens: int, longest: int) -> Spans:
        """From bounds alone, without waiting for the device."""
        places = torch.arange(num_tokens, dtype=bounds.dtype, device=bounds.device)
        starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
        return cls(bounds, (places - starts).long(), longest)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Within each sequence: q [M, H, D], k and v [M, KVH, D] to [M, H, D]; no gradients."""
    return _flash(q, k, v, spans)[0]


class OwnColumns:
    """Merges own keys into the flash part, forward and backward; each is a function of tensors that may be compiled."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.merge = wrap(_merge)
        self.gradients = wrap(_merge_gradients)


def own_attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: list[Tensor], own_v: list[Tensor], spans: Spans, columns: OwnColumns
) -> Tensor:
    """q [M, H, D]; k, v and each of `own_k` and `own_v` [M, KVH, D]. Returns [M, H, D]."""
    output: Tensor = _OwnAttention.apply(q, k, v, spans, columns, *own_k, *own_v)  # type: ignore[no-untyped-call]
    return output


class _OwnAttention(torch.autograd.Function):
    """Flash attention's own backward, given the merged output and sum, yields the true keys' part exactly."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, columns: OwnColumns, *own: Tensor) -> Tensor:
        output, log_sum, extra = _flash(q, k, v, spans)
        total = log_sum
        if own:
            half = len(own) // 2
            output, total = columns.merge(q, output, log_sum, list(own[:half]), list(own[half:]))
        ctx.save_for_backward(q, k, v, output, total, *own, *extra)
        ctx.spans, ctx.columns, ctx.num_own = spans, columns, len(own)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, total, *rest = ctx.saved_tensors
        own, extra = rest[: ctx.num_own], rest[ctx.num_own :]
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, output, total, extra, ctx.spans)
        if not own:
            return grad_q, grad_k, grad_v, None, None
        half = len(own) // 2
        grad_q, own_k, own_v = ctx.columns.gradients(grad_q, grad, q, output, total, list(own[:half]), list(own[half:]))
        return grad_q, grad_k, grad_v, None, None, *own_k, *own_v


def _grouped(heads: Tensor, num_kv_heads: int) -> Tensor:
    """[M, H, D] as float32 [M, KVH, H / KVH, D]."""
    grouped: Tensor = heads.float().unflatten(1, (num_kv_heads, -1))
    return grouped


def _merge(
    q: Tensor, output: Tensor, log_sum: Tensor, own_k: list[Tensor], own_v: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The merged output [M, H, D] and the logarithm of all weights' sum, float32 [M, H]."""
    scale = q.shape[-1] ** -0.5
    queries = _grouped(q, own_k[0].shape[1])
    true = log_sum.unflatten(1, (own_k[0].shape[1], -1))
    scores = [(queries * k.float().unsqueeze(2)).sum(-1) * scale for k in own_k]
    largest = true
    for score in scores:
        largest = torch.maximum(largest, score)
    weight = (true - largest).exp()
    mixed = _grouped(output, own_k[0].shape[1]) * weight.unsqueeze(-1)
    total = weight
    for score, v in zip(scores, own_v, strict=True):
        weight = (score - largest).exp()
        mixed = mixed + weight.unsqueeze(-1) * v.float().unsqueeze(2)
        total = total + weight
    merged = (mixed / total.unsqueeze(-1)).flatten(1, 2).to(q.dtype)
    return merged, (largest + total.log()).flatten(1, 2)


def _merge_gradients(
    grad_q: Tensor, grad: Tensor, q: Tensor, output: Tensor, total: Tensor, own_k: list[Tensor], own_v: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Of q, with the flash part's, and of the own keys and values."""
    scale = q.shape[-1] ** -0.5
    num_kv_heads = own_k[0].shape[1]
    queries, grads = _grouped(q, num_kv_heads), _grouped(grad, num_kv_heads)
    log_sum = total.unflatten(1, (num_kv_heads, -1))
    inner = (grads * _grouped(output, num_kv_heads)).sum(-1)
    found = _grouped(grad_q, num_kv_heads)
    own_grad_k, own_grad_v = [], []
    for k, v in zip(own_k, own_v, strict=True):
        key = k.float().unsqueeze(2)
        weight = ((queries * key).sum(-1) * scale - log_sum).exp()
        slope = (weight * ((grads * v.float().unsqueeze(2)).sum(-1) - inner) * scale).unsqueeze(-1)
        found = found + slope * key
        own_grad_k.append((slope * queries).sum(2).to(k.dtype))
        own_grad_v.append((weight.unsqueeze(-1) * grads).sum(2).to(v.dtype))
    return found.flatten(1, 2).to(q.dtype), own_grad_k, own_grad_v


def _flash(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Causal attention within sequences, each query's logarithm of the sum [M, H], and what backward wants besides."""
    scale = q.shape[-1] ** -0.5
    if not q.is_cuda or q.dtype == torch.float32:
        scores = _scores(q, k, spans, scale)
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(0, 1)
        return (
            (scores.softmax(-1).to(v.dtype) @ values).transpose(0, 1).contiguous(),
            scores.float().logsumexp(-1).t().contiguous(),
            [],
        )
    size = spans.longest
    found = aten._flash_attention_forward(
        q, k, v, spans.bounds, spans.bounds, size, size, 0.0, True, False, scale=scale
    )
    # [H, M] there.
    return found[0], found[1].t(), [found[2], found[3]]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, extra: list[Tensor], spans: Spans
) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    if not q.is_cuda or q.dtype == torch.float32:
        return _by_definition(grad, q, k, v, output, total, spans, scale)
    size = spans.longest
    found = aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        output,
        total.t().contiguous(),
        spans.bounds,
        spans.bounds,
        size,
        size,
        0.0,
        True,
        *extra,
        scale=scale,
    )
    return found[0], found[1], found[2]


def _scores(q: Tensor, k: Tensor, spans: Spans, scale: float) -> Tensor:
    """float32 or as q, [H, M, M]; -inf where a query does not see a key."""
    places = torch.arange(q.shape[0], device=q.device)
    starts = places - spans.positions
    seen = (places <= places.unsqueeze(1)) & (starts == starts.unsqueeze(1))
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores: Tensor = q.transpose(0, 1) @ keys.permute(1, 2, 0) * scale
    return scores.masked_fill(~seen, float("-inf"))


def _by_definition(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Flash attention's backward with the weights in memory, where there is no kernel for device or dtype."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    grad, q, k, v, output = (part.float() for part in (grad, q, k, v, output))
    weights = (_scores(q, k, spans, scale) - total.t().unsqueeze(-1)).exp()
    keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (k, v))
    grad, q, output = (part.transpose(0, 1) for part in (grad, q, output))
    inner = grad @ values.transpose(-1, -2) - (grad * output).sum(-1, keepdim=True)
    slopes = weights * inner * scale
    grad_q = (slopes @ keys).transpose(0, 1)
    grad_k, grad_v = (
        part.transpose(0, 1).unflatten(1, (-1, group)).sum(2)
        for part in (slopes.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad)
    )
    return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype)
