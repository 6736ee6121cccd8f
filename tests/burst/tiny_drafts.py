"""Tiny draft models for tests of runners, and what they compute when no KV is kept."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, ForwardBatch, Segment, TokenBatch
from outrider.attention.torch_backend import TorchAttention
from outrider.cache.kv import KVCache
from outrider.drafting.model.context import ContextCut
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel

FEATURE_SIZE = 24


class _TinyDraft(DraftModel):
    def __init__(self, model: CausalLM) -> None:
        config = model.config
        self.model = model
        self.dtype, self.device = model.dtype, model.device
        self.num_layers, self.num_heads = config.num_layers, config.num_heads
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.max_positions = config.max_positions
        self.vocab_size = self.target_vocab_size = config.vocab_size
        self.target_ids = None
        self.token_ids_hash = ""
        self.hidden_size, self.feature_layers, self.feature_size = 0, (), 0

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        return self.model.forward(batch, kv, attention), None

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        return self.model.logits(rows)


def chain_draft(model: CausalLM) -> DraftModel:
    """A language model as it is."""
    return _TinyDraft(model)


class FeatureDraft(_TinyDraft):
    """The same with a feature added to each embedding, and one returned for the children, of every draft id a third."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self.feature_size = FEATURE_SIZE
        self.hidden_size, self.feature_layers = FEATURE_SIZE, (1, 2)
        generator = torch.Generator().manual_seed(5)
        hidden = model.config.hidden_size

        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * 0.3).to(self.device, self.dtype)

        self._into, self._out = matrix(FEATURE_SIZE, hidden), matrix(hidden, FEATURE_SIZE)
        self._project = matrix(2 * FEATURE_SIZE, FEATURE_SIZE)
        ids = torch.arange(0, model.config.vocab_size, 3, dtype=torch.int32)
        self.target_ids = ids.to(self.device)
        self.vocab_size = len(ids)

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        assert features is not None
        model = self.model
        plan = attention.plan(batch, kv, self.num_heads, model.rotary)
        stream = torch.nn.functional.embedding(batch.token_ids, model.embedding) + features @ self._into
        for layer in model.layers:
            stream = layer(stream, plan)
        rows = model.norm(stream)
        return rows, torch.tanh(rows @ self._out)

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        return self.model.logits(rows)[:, ::3].contiguous()

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        return features @ self._project


def seen_positions(cut: ContextCut, count: int) -> list[int]:
    """KV positions of the sequence at the first `count` places of a context."""
    return [place + (cut.gap if place >= cut.sinks else 0) for place in range(count)]


_KNOWN = WeakKeyDictionary[DraftModel, dict[tuple[tuple[int, ...], bytes], tuple[Tensor, Tensor | None]]]()
"""What models have given: tests that differ in what runs them have the same sequences."""


class Plain:
    """A draft model run over whole sequences, on memory of its own, once over each."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.lag = 1 if model.feature_size else 0

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], features: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Logits behind the last token, and the feature for its children.

        `features` are those that each token but the first takes, for a model with features.
        """
        known = _KNOWN.setdefault(self.model, {})
        given = torch.stack(list(features)) if self.lag else None
        key = (tuple(tokens), b"" if given is None else given.float().cpu().numpy().tobytes())
        if key not in known:
            known[key] = self._run(tokens, given)
        return known[key]

    def _run(self, tokens: Sequence[int], given: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ids = torch.tensor(tokens[self.lag :], device=self.model.device)
        count = len(ids)
        batch = ForwardBatch(ids, torch.arange(count), [Segment(count, torch.arange(count))])
        kv = self.model.new_kv(count)
        rows, brought = self.model.forward(batch, given, kv, TorchAttention())
        return self.model.logits(rows[-1:])[0], None if brought is None else brought[-1]
