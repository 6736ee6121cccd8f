"""Runs a head along a prompt and then along its own guesses, with a cache and without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny_models import token_ids
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment, TokenBatch
from outrider.attention.torch_backend import TorchAttention
from outrider.config.draft import DraftOptions
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import BlockHead
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


def path_logits(model: DraftModel, raw: Tensor, path: list[int]) -> Tensor:
    """Logits after each token of a path whose first token is behind the features."""
    assert isinstance(model, BlockHead)
    length, size = raw.shape[0], model.block.size
    kv, attention = model.new_kv(length + size), TorchAttention()
    places = torch.arange(length)
    batch = TokenBatch(token_ids(length), places)
    model.extend(batch, model.project(raw), places, kv, attention)
    tokens = model.block_tokens(torch.tensor(path[:1]), torch.tensor([length]))
    segment = Segment(size, torch.arange(length + size), torch.ones(size, size, dtype=torch.bool))
    blocks, where = model.new_blocks(2), torch.tensor([1])
    rows = model.forward_blocks(ForwardBatch(*tokens, [segment]), kv, attention)
    model.keep_blocks(blocks, where, torch.tensor([length]), rows)
    memory = torch.randn(1, model.state_size)
    logits = []
    for number, token in enumerate(path):
        found, memory = model.read_blocks(blocks, where, torch.tensor([token]), torch.tensor([length + number]), memory)
        logits.append(found)
    return torch.cat(logits)
