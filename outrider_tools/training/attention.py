"""Attention of a drafter that is trained on its own features.

Step 0 runs the drafter over a sequence with the target's features, causally. Step j runs it again at every position as
if the target's features ended there: its query sees the keys of step 0 up to its own position, and of steps 1 to j its
own position alone. So most of the work is causal attention over one set of keys, whatever the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def own_attention(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """Attend to true keys up to the query's position, and to the query's own column of later steps.

    Args:
        q: [B, H, T, D].
        k: the same, keys of step 0; so are its values `v`.
        own_k: [B, H, J, T, D], keys of steps 1 to J; so are their values `own_v`.

    Returns:
        [B, H, T, D].
    """
    output: Tensor = _OwnAttention.apply(q, k, v, own_k, own_v)  # type: ignore[no-untyped-call]
    return output


class _OwnAttention(torch.autograd.Function):
    """Flash attention over the true keys; the few own keys are merged by the logarithm of the sum of weights.

    Backward: with the merged output and sum, flash attention's own backward gives the true keys' part exactly, for
    all that it takes from the forward is the weight exp(score - sum) and the product of output and its gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        output, log_sum, extra = _flash(q, k, v, scale)
        scores = (q.unsqueeze(2) * own_k).sum(-1, dtype=torch.float32) * scale
        total = torch.logaddexp(log_sum, scores.logsumexp(2))
        merged = output * (log_sum - total).exp().unsqueeze(-1)
        merged += ((scores - total.unsqueeze(2)).exp().unsqueeze(-1) * own_v).sum(2)
        merged = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, own_k, own_v, merged, total, *extra)
        ctx.scale = scale
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, own_k, own_v, output, total, *extra = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, output, total, extra, ctx.scale)
        weights = ((q.unsqueeze(2) * own_k).sum(-1, dtype=torch.float32) * ctx.scale - total.unsqueeze(2)).exp()
        inner = (grad.unsqueeze(2) * own_v).sum(-1, dtype=torch.float32)
        inner -= (grad * output).sum(-1, dtype=torch.float32).unsqueeze(2)
        grad_scores = (weights * inner * ctx.scale).unsqueeze(-1).to(q.dtype)
        grad_q = grad_q + (grad_scores * own_k).sum(2)
        grad_own_v = weights.unsqueeze(-1).to(q.dtype) * grad.unsqueeze(2)
        return grad_q, grad_k, grad_v, grad_scores * q.unsqueeze(2), grad_own_v


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Causal attention, the logarithm of each query's sum of weights [B, H, T], and what backward wants besides."""
    if q.is_cuda and q.dtype == torch.float32:
        # No flash attention for this dtype there: the sum is computed with the scores in memory, the rest in backward.
        return (*_with_scores(q, k, v, scale), [])
    if q.is_cuda:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
        return found[0], found[1], [found[6], found[7]]
    output, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return output, log_sum, []


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, extra: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda and q.dtype == torch.float32:
        return _with_scores_backward(grad, q, k, v, output, total, scale)
    if q.is_cuda:
        size = q.shape[2]
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, output, total, None, None, size, size, 0.0, True, *extra, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, total, 0.0, True, scale=scale
        )
    return found[0], found[1], found[2]


def _causal_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))


def _with_scores(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _causal_scores(q, k, scale)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _with_scores_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_causal_scores(q, k, scale) - total.unsqueeze(-1)).exp()
    inner = grad @ v.transpose(-1, -2) - (grad * output).sum(-1, keepdim=True)
    grad_scores = weights * inner * scale
    return grad_scores @ k, grad_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
