"""Causal attention over packed sequences, also for a drafter that runs ahead on its own features.

Step 0 runs a drafter over a sequence with the target's features, causally. Step j runs it again at every position as
if the target's features ended there: its query sees the keys of step 0 up to its own position, and of steps 1 to j only
those at its own position. So in every step most of the work is causal attention over one set of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from kernels.elementwise import rope_write, rotary_angles
from outrider.attention.base import PLAIN, AttentionBackend, AttentionPlan, LayerRules, TokenBatch
from outrider.attention.torch_backend import HeadSplit
from outrider.cache.kv import KVCache
from outrider.layers.linear import RMSNorm
from outrider.layers.rotary import Rotary

aten = torch.ops.aten

Split = Callable[[Tensor, RMSNorm | None], tuple[Tensor, Tensor, Tensor]]
"""Turns the output of a layer's qkv projection into q, k and v, like `HeadSplit`."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the sequences of M tokens lie.

    Attributes:
        bounds: int32 [S + 1], from 0 to M; sequence s is bounds[s] to bounds[s + 1] - 1, and may be empty.
        positions: int64 [M], each token's position in its sequence.
        longest: upper bound of the tokens of a sequence.
    """

    bounds: Tensor
    positions: Tensor
    longest: int

    @classmethod
    def of(cls, bounds: Tensor, num_tokens: int, longest: int) -> Spans:
        """Make spans from bounds alone, without waiting for the device."""
        places = torch.arange(num_tokens, dtype=bounds.dtype, device=bounds.device)
        starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
        return cls(bounds, (places - starts).long(), longest)

    @classmethod
    def whole(cls, num_tokens: int, device: torch.device) -> Spans:
        """Return the span of a single sequence."""
        bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        return cls(bounds, torch.arange(num_tokens, device=device), num_tokens)

    def places(self) -> list[slice]:
        """Return the slices of all sequences that are not empty. Waits for the device."""
        bounds = self.bounds.tolist()
        return [slice(start, end) for start, end in pairwise(bounds) if end > start]


def check_plain(rules: LayerRules) -> None:
    """Raise ValueError for rules that training does not support: heads have none, and such targets are refused."""
    if rules is not PLAIN:
        raise ValueError("training attends over all positions, with one rotary embedding, and scores as they are")


class SpanAttention(AttentionBackend, AttentionPlan):
    """Causal attention within each of some spans, for one forward of their tokens. Writes nothing to a KV cache.

    Attributes:
        kept: with `keep`, each layer's keys and values [M, KVH, D].
    """

    def __init__(self, spans: Spans, keep: bool = False) -> None:
        self._spans = spans
        self._keep = keep
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        self._split = _head_split(batch, kv, num_heads, rotary)
        return self

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None, rules: LayerRules = PLAIN) -> Tensor:
        """See AttentionPlan."""
        check_plain(rules)
        q, k, v = self._split(heads, qk_norm)
        if self._keep:
            self.kept[layer] = (k.contiguous(), v.contiguous())
        return causal_attention(q, k, v, self._spans).flatten(1)


def _head_split(batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> Split:
    """Return HeadSplit, or on a GPU a function that does the same in one launch, if the head size allows it."""
    shape = (batch.token_ids.shape[0], *kv.k.shape[2:])
    if not batch.token_ids.is_cuda or shape[-1] < 16 or shape[-1] & (shape[-1] - 1):
        return HeadSplit(batch, kv, num_heads, rotary)
    angles = rotary_angles(batch.positions.to(torch.int32), rotary.half_frequencies, rotary.scale)
    slots = torch.arange(shape[0], dtype=torch.int32, device=kv.k.device)

    def split(heads: Tensor, qk_norm: RMSNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        weight, eps = (qk_norm.weight, qk_norm.eps) if qk_norm is not None else (None, 0.0)
        k, v = (torch.empty(shape, dtype=kv.k.dtype, device=kv.k.device) for _ in range(2))
        return rope_write(heads, *angles, slots, k, v, num_heads, weight, eps), k, v

    return split


def causal_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Attend within each sequence: q [M, H, D], k and v [M, KVH, D] to [M, H, D]. Has no gradients."""
    if _has_kernel(q):
        return _flash(q, k, v, spans)[0]
    output = torch.empty_like(q)
    for place in spans.places():
        one_q, one_k, one_v = (part[place].transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        found = scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True, enable_gqa=True)
        output[place] = found[0].transpose(0, 1)
    return output


class OwnKeyMerger:
    """Merges own keys into the result of flash attention, forward and backward. `wrap` may compile both functions."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.merge = wrap(_merge)
        self.gradients = wrap(_merge_gradients)


def own_attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: list[Tensor], own_v: list[Tensor], spans: Spans, columns: OwnKeyMerger
) -> Tensor:
    """Attend to the sequence's keys of step 0 up to the query's position, and to later steps' keys at that position.

    Args:
        q: [M, H, D].
        k: [M, KVH, D], keys of step 0, whose values are `v`.
        own_k: keys of steps 1 to J, [M, KVH, D] each, whose values are `own_v`. On a CPU or in half precision.

    Returns [M, H, D].
    """
    output: Tensor = _OwnAttention.apply(q, k, v, spans, columns, *own_k, *own_v)  # type: ignore[no-untyped-call]
    return output


class _OwnAttention(torch.autograd.Function):
    """Flash attention over the keys of step 0; the few own keys are merged by the logarithm of the sum of weights.

    Backward calls flash attention's own backward with the merged output and sum, which gives the exact part of step 0's
    keys: it only takes the weight exp(score - sum) and the product of output and gradient from the forward.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, columns: OwnKeyMerger, *own: Tensor) -> Tensor:
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
    """Return heads [M, H, D] as float32 [M, KVH, H / KVH, D]."""
    grouped: Tensor = heads.float().unflatten(1, (num_kv_heads, -1))
    return grouped


def _merge(
    q: Tensor, output: Tensor, log_sum: Tensor, own_k: list[Tensor], own_v: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the merged output [M, H, D] and the logarithm of the sum of all weights, float32 [M, H]."""
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
    """Return the gradients of q, the flash part's `grad_q` included, and of the own keys and values."""
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


def _has_kernel(q: Tensor) -> bool:
    """Whether a flash attention kernel for many sequences at once takes `q`."""
    return q.is_cuda and q.dtype != torch.float32


def _flash(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attend causally within sequences. Return output, log of the sum of weights [M, H], and extras for backward."""
    scale = q.shape[-1] ** -0.5
    if _has_kernel(q):
        size = spans.longest
        found = aten._flash_attention_forward(
            q, k, v, spans.bounds, spans.bounds, size, size, 0.0, True, False, scale=scale
        )
        # The kernel's logarithms are [H, M].
        return found[0], found[1].t(), [found[2], found[3]]
    output = torch.empty_like(q)
    log_sum = torch.empty(q.shape[:2], dtype=torch.float32)
    for place, heads in _sequences(spans, q, k, v):
        found = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scale)
        output[place], log_sum[place] = found[0][0].transpose(0, 1), found[1][0].t()
    return output, log_sum, []


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, extra: list[Tensor], spans: Spans
) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    if _has_kernel(q):
        size, bounds, sums = spans.longest, spans.bounds, total.t().contiguous()
        found = aten._flash_attention_backward(
            grad, q, k, v, output, sums, bounds, bounds, size, size, 0.0, True, *extra, scale=scale
        )
        return found[0], found[1], found[2]
    grads = [torch.empty_like(part) for part in (q, k, v)]
    for place, (rows, *heads) in _sequences(spans, grad, q, k, v, output):
        sums = total[place].t().unsqueeze(0)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(rows, *heads, sums, 0.0, True, scale=scale)
        for whole, part in zip(grads, found, strict=True):
            # The gradient of a key or value is a sum over the queries that share it.
            whole[place] = part[0].transpose(0, 1).unflatten(1, (whole.shape[1], -1)).sum(2)
    return grads[0], grads[1], grads[2]


def _sequences(spans: Spans, *parts: Tensor) -> list[tuple[slice, list[Tensor]]]:
    """Return each sequence's slice, and its part [1, H, T, D] of tensors [M, H, D], with key heads repeated to H."""
    num_heads = max(part.shape[1] for part in parts)
    whole = [part.repeat_interleave(num_heads // part.shape[1], 1).transpose(0, 1).unsqueeze(0) for part in parts]
    return [(place, [part[:, :, place].contiguous() for part in whole]) for place in spans.places()]
