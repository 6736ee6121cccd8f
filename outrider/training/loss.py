"""Cross-entropy against the target's own distribution, without keeping a matrix of logits for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outrider.models.base import CausalLM

# Logits that are in memory at a time.
CHUNK_LOGITS = 2**27


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a drafter should have said at R places.

    Attributes:
        chances: [R, draft vocabulary], the target's, of all its vocabulary: what is outside the draft's is missing.
        best: int64 [R], draft id of the target's likeliest token; -1 where it is outside the draft vocabulary.
    """

    chances: Tensor
    best: Tensor


@torch.no_grad()
def wanted_at(model: CausalLM, hidden: Tensor, target_ids: Tensor, draft_ids: Tensor) -> Wanted:
    """The target's distribution at `hidden` [R, hidden_size].

    `target_ids` int64 [draft vocabulary]: the target's id of each draft id; `draft_ids` int64 [vocabulary], -1 for
    tokens that the drafter does not have.
    """
    chances, best = [], []
    for rows in _chunks(hidden, draft_ids.shape[0]):
        logits = model.logits(rows)
        log_sum = logits.logsumexp(1, keepdim=True)
        chances.append((logits.index_select(1, target_ids) - log_sum).exp().to(hidden.dtype))
        best.append(draft_ids[logits.argmax(1)])
    return Wanted(torch.cat(chances), torch.cat(best))


def soft_cross_entropy(rows: Tensor, weight: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Mean over R rows [R, hidden] of -sum(chances * log softmax(rows @ weight^T)); `weight` [draft vocab, hidden].

    Chances that add up to less than one weigh their row accordingly.

    Returns:
        the loss, a float32 scalar, and bool [R]: whether the likeliest tokens agree.
    """
    loss, hits = _SoftCrossEntropy.apply(rows, weight, wanted.chances, wanted.best)  # type: ignore[no-untyped-call]
    return loss, hits


class _SoftCrossEntropy(torch.autograd.Function):
    """Gradients are computed on the way forward, chunk by chunk, while the logits are there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, chances: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = rows.shape[0]
        cast = weight.to(rows.dtype)
        grad_rows = torch.empty_like(rows)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        hits = torch.empty(num_rows, dtype=torch.bool, device=rows.device)
        start = 0
        for part in _chunks(rows, weight.shape[0]):
            place = slice(start, start + part.shape[0])
            start = place.stop
            logits = (part @ cast.t()).float()
            hits[place] = logits.argmax(1) == best[place]
            wanted = chances[place].float()
            mass = wanted.sum(1, keepdim=True)
            log_chances = logits.log_softmax(1)
            loss -= (wanted * log_chances).sum()
            grad = ((log_chances.exp_() * mass - wanted) / num_rows).to(rows.dtype)
            grad_rows[place] = grad @ cast
            grad_weight += (grad.t() @ part).float()
        ctx.save_for_backward(grad_rows, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(hits)
        return loss / num_rows, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_rows, grad_weight = ctx.saved_tensors
        return grad_rows * grad.to(grad_rows.dtype), grad_weight * grad, None, None


def _chunks(rows: Tensor, num_columns: int) -> Iterator[Tensor]:
    return iter(rows.split(max(1, CHUNK_LOGITS // num_columns)))
