"""Runs a head along a prompt and then along its own guesses, with a cache and without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.config.draft import DraftOptions
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.loader import load_draft_model

# From the pairs of a whole sequence, ids [L] and features [L, size]: logits [L, vocab], children's features [L, size].
Whole = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

CPU = torch.device("cpu")


def load(algorithm: str, dtype: torch.dtype = torch.float32, device: torch.device = CPU, **options: str) -> DraftModel:
    found = DraftOptions(speculative_algorithm=(algorithm,), **options)  # type: ignore[arg-type]
    return load_draft_model(found, device, dtype)


def run_chain(model: DraftModel, ids: Tensor, features: Tensor, steps: int) -> tuple[Tensor, list[int]]:
    """Logits at the last pair and after each guess, and the guesses: target ids, each step's one rank further down.

    Pair i is (ids[i], features[i]) at position i; `features` are projected.
    """
    kv, attention = model.new_kv(ids.numel() + steps), TorchAttention()
    logits, guesses, start = [], [], 0
    for step in range(steps):
        end = start + ids.numel()
        batch = ForwardBatch(ids, torch.arange(start, end), [Segment(ids.numel(), torch.arange(end))])
        rows, own = model.forward(batch, features, kv, attention)
        assert own is not None and own.shape == (ids.numel(), model.feature_size)
        logits.append(model.logits(rows[-1:]))
        best = int(logits[-1][0].argsort(descending=True)[step])
        guesses.append(best if model.target_ids is None else int(model.target_ids[best]))
        ids, features, start = torch.tensor(guesses[-1:]), own[-1:], end
    return torch.cat(logits), guesses


def recompute_chain(whole: Whole, ids: Tensor, features: Tensor, guesses: list[int]) -> Tensor:
    """The same logits without a cache: each step over the whole sequence again."""
    logits = []
    for guess in guesses:
        found, own = whole(ids, features)
        logits.append(found[-1:])
        ids, features = torch.cat((ids, torch.tensor([guess]))), torch.cat((features, own[-1:]))
    return torch.cat(logits)
