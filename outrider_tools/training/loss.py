"""Cross-entropy against the target's own distribution, and the hit loss; no logits are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outrider.models.decoder import CausalLM
from outrider.sampling.proposer import HEAD_SCALE

# Most logits in memory at a time.
CHUNK_LOGITS = 2**27
# At temperature 1, the best candidate of a served head is a draw from softmax(SHARPNESS * logits).
SHARPNESS = HEAD_SCALE.log_q / HEAD_SCALE.noise
# Least chance of a hit, so that its logarithm stays finite.
MIN_HIT = 1e-9


@dataclass(frozen=True, slots=True)
class TargetProbs:
    """The target's distribution at R places, over the draft vocabulary.

    Attributes:
        probs: [R, draft vocabulary]; rows sum to less than 1 by the probability of tokens outside the draft vocabulary.
        top_ids: int64 [R], draft id of the target's likeliest token; -1 if it is outside the draft vocabulary.
    """

    probs: Tensor
    top_ids: Tensor


class TargetLoss:
    """The target's distribution, and the loss against it. `wrap` may compile the functions that work on logits.

    With a `hit_weight` above 0 the loss is (1 - hit_weight) * cross-entropy + hit_weight * hit loss (`_hit_slopes`).
    """

    def __init__(self, wrap: Callable[[Any], Any], hit_weight: float = 0.0) -> None:
        self._target_probs = wrap(_target_probs)
        self._slopes = wrap(_mixed(hit_weight) if hit_weight else _slopes)

    @torch.no_grad()
    def target_probs(
        self, model: CausalLM, hidden: Tensor, target_ids: Tensor, draft_ids: Tensor, counts: Tensor
    ) -> TargetProbs:
        """Return the target's distribution at `hidden` [R, hidden_size]. Rows with False in bool `counts` [R] get 0.

        `target_ids` int64 [draft vocabulary]: the target's id of each draft id; `draft_ids` int64 [vocabulary], -1 for
        tokens outside the draft vocabulary.
        """
        probs, top_ids = [], []
        parts = zip(_chunks(hidden, draft_ids.shape[0]), _chunks(counts, draft_ids.shape[0]), strict=True)
        for rows, counting in parts:
            found = self._target_probs(model.logits(rows), target_ids, draft_ids, counting)
            probs.append(found[0].to(hidden.dtype))
            top_ids.append(found[1])
        return TargetProbs(torch.cat(probs), torch.cat(top_ids))

    def __call__(self, rows: Tensor, weight: Tensor, target_probs: TargetProbs, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over R rows of -sum(probs * log softmax(rows @ weight^T)), divided by the scalar `count`.

        `rows` are [R, hidden], `weight` [draft vocabulary, hidden]. Rows whose probabilities sum to less than one weigh
        less in proportion.

        The loss is a float32 scalar. Also returns bool [R]: whether the likeliest tokens agree.
        """
        loss, hits = _SoftCrossEntropy.apply(rows, weight, target_probs, count, self._slopes)  # type: ignore[no-untyped-call]
        return loss, hits


def _target_probs(logits: Tensor, target_ids: Tensor, draft_ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    log_sum = logits.logsumexp(1, keepdim=True)
    probs = (logits.index_select(1, target_ids) - log_sum).exp() * counts.unsqueeze(1)
    # No draft id is -2, so a row that does not count is never a hit.
    return probs, torch.where(counts, draft_ids[logits.argmax(1)], -2)


def _slopes(logits: Tensor, probs: Tensor, top_ids: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's loss, whether it agrees, and the gradient of sum / count, in the dtype of the logits.

    Works on one chunk, in float32 inside. Written so that a compiler makes two passes of it.
    """
    scores, target_probs = logits.float(), probs.float()
    mass = target_probs.sum(1, keepdim=True)
    log_sum = scores.logsumexp(1, keepdim=True)
    loss = (mass * log_sum).squeeze(1) - (target_probs * scores).sum(1)
    grad = ((scores - log_sum).exp() * mass - target_probs) / count
    return loss, scores.argmax(1) == top_ids, grad.to(logits.dtype)


def _hit_slopes(logits: Tensor, probs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's hit loss, and the gradient of sum / count in float32, for one chunk.

    With shared noise, the choices of a target p and a draft q are equal with a chance from hit / (2 - hit) to hit,
    where hit = sum(min(p, q)) is 1 less their total variation. The loss is -mass * log(hit / mass): p lacks what is
    outside the draft vocabulary, so hit is at most p's mass, and rows weigh as in the cross-entropy. The gradient is
    proportional to q: tokens that q has too little of rise, the others fall, and no logit of the far tail matters.
    """
    target_probs = probs.float()
    draft_probs = (logits.float() * SHARPNESS).softmax(1)
    mass = target_probs.sum(1, keepdim=True)
    hit = torch.minimum(draft_probs, target_probs).sum(1, keepdim=True).clamp(min=MIN_HIT)
    loss = mass * (mass.clamp(min=MIN_HIT).log() - hit.log())
    lacking = (draft_probs < target_probs).float()
    share = (draft_probs * lacking).sum(1, keepdim=True)
    return loss.squeeze(1), draft_probs * (share - lacking) * (mass / hit) * (SHARPNESS / count)


def _mixed(hit_weight: float) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return a function like `_slopes` for the weighted sum of both losses."""

    def slopes(logits: Tensor, probs: Tensor, top_ids: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss, hits, grad = _slopes(logits.float(), probs, top_ids, count)
        hit_loss, hit_grad = _hit_slopes(logits, probs, count)
        loss = loss.lerp(hit_loss, hit_weight)
        return loss, hits, grad.lerp(hit_grad, hit_weight).to(logits.dtype)

    return slopes


class _SoftCrossEntropy(torch.autograd.Function):
    """Computes gradients in the forward, chunk by chunk, while the logits are there; only for inputs that need them."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, target_probs: TargetProbs, count: Tensor, slopes: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        num_rows = rows.shape[0]
        cast = weight.to(rows.dtype)
        grad_rows = torch.empty_like(rows)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        hits = torch.empty(num_rows, dtype=torch.bool, device=rows.device)
        start = 0
        for part in _chunks(rows, weight.shape[0]):
            place = slice(start, start + part.shape[0])
            start = place.stop
            losses, hits[place], grad = slopes(
                part @ cast.t(), target_probs.probs[place], target_probs.top_ids[place], count
            )
            loss += losses.sum()
            grad_rows[place] = grad @ cast
            if grad_weight is not None:
                grad_weight += (grad.t() @ part).float()
        ctx.save_for_backward(grad_rows, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(hits)
        return loss / count, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_rows, grad_weight = ctx.saved_tensors
        of_weight = None if grad_weight is None else grad_weight * grad
        return grad_rows * grad.to(grad_rows.dtype), of_weight, None, None, None


def _chunks(rows: Tensor, num_columns: int) -> Iterator[Tensor]:
    """Split rows into chunks, of equal size if the number of rows allows it, so that few shapes occur."""
    num_rows = rows.shape[0]
    count = max(1, -(-num_rows * num_columns // CHUNK_LOGITS))
    count = next((more for more in range(count, 2 * count) if num_rows % more == 0), count)
    return iter(rows.split(max(1, -(-num_rows // count))))
