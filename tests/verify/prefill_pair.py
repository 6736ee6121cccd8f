"""Chunks of prompts computed twice: by an executor, and in their own shapes, kernel by kernel, on KV of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from cuda_harness import VOCAB, make_paged_engine
from harness import Answer, make_request
from torch import Tensor

from outrider.attention.triton_backend import TritonAttention
from outrider.cache.kv import FeatureStore
from outrider.models.decoder import CausalLM
from outrider.sampling.params import SamplingParams
from verify_service.engine.request import Request
from verify_service.engine.round import Entry
from verify_service.executors.base import Executor
from verify_service.executors.cuda import CudaRound
from verify_service.executors.prefill import Prefill, PrefillShapes
from verify_service.executors.ranks import ExecutorLink
from verify_service.features.staging import FeaturePlan


class PrefillPair:
    """What the executor stores must be what the other one does."""

    def __init__(self, model: CausalLM, num_pages: int = 256, **options: Any) -> None:
        engine, self.executor = make_paged_engine(model, num_pages, **options)
        self.memory = engine.memory
        self.prefill, rows = self.executor.prefill, self.executor.rows
        self._model = model
        self._source = random.Random(1)
        self._other = other = Executor(model, num_pages * self.executor.page_size, TritonAttention())
        exact = PrefillShapes(1 << 20, 1 << 10, padded=False)
        self._exact = Prefill(
            model,
            lambda batch: other._forward(batch, batch.slots, other._features),
            rows,
            self.executor.page_size,
            exact,
            ExecutorLink(),
        )
        for cache in (self.executor._kv.k, self.executor._kv.v):
            cache.zero_()

    def request(self) -> Request:
        """One with a long prompt."""
        prompt = [self._source.randrange(VOCAB) for _ in range(self.executor.limits.context_length - 1)]
        return make_request(Answer(), prompt, SamplingParams(temperature=0.0), VOCAB)

    @torch.inference_mode()
    def run(self, *chunks: tuple[Request, int], wait: bool = True) -> None:
        """The next tokens of some requests in one round."""
        entries, pending = self._launch(chunks)
        if wait:
            pending.wait()
        self._exact.run(entries)
        for request, count in chunks:
            request.cached_len += count

    def launch(self, *chunks: tuple[Request, int]) -> None:
        """The executor's part of it alone, which counts for nothing."""
        self._launch(chunks)

    def _launch(self, chunks: Sequence[tuple[Request, int]]) -> tuple[list[Entry], CudaRound]:
        entries = [Entry(request, count) for request, count in chunks]
        for request, count in chunks:
            assert self.memory.reserve(request, request.cached_len + count)
        return entries, self.executor.launch(entries)

    @torch.inference_mode()
    def store_features(self, layers: tuple[int, ...]) -> None:
        """Have them stored from now on."""
        self.executor.begin_features(FeaturePlan(layers))
        while self.executor.refresh_features():
            pass
        model = self._model
        hidden, num_slots = model.config.hidden_size, self._other._kv.num_slots
        self._other._features = FeatureStore(layers, hidden, num_slots, model.dtype, model.device)

    def check(self, tolerance: float) -> int:
        """Compare all that is stored, and where nothing is; returns how many slots are written."""
        kv, exact_kv = self.executor._kv, self._other._kv
        for name, ours, exact in (("k", kv.k, exact_kv.k), ("v", kv.v, exact_kv.v)):
            written = _compare(name, ours.transpose(0, 1), exact.transpose(0, 1), tolerance)
        stored, expected = self.executor._features, self._other._features
        if stored is not None and expected is not None:
            # The last slot is for what belongs to no token.
            places = (stored._halves[:, :-1].transpose(0, 1), expected._halves[:, :-1].transpose(0, 1))
            _compare("features", *places, tolerance)
        return written


def _compare(name: str, ours: Tensor, exact: Tensor, tolerance: float) -> int:
    """Both [num_slots, ...]."""
    ours, exact = ours.flatten(1).float(), exact.flatten(1).float()
    used, expected = ours.any(1), exact.any(1)
    assert torch.equal(used, expected), f"{name}: {int((used != expected).sum())} slots are written in one alone"
    error = (ours - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-6)
    assert float(error.max()) <= tolerance, f"{name} of slot {int(error.argmax())} is off by {float(error.max())}"
    return int(used.sum())


def run_story(pair: PrefillPair, *stores: tuple[int, ...]) -> int:
    """Chunks of all kinds, one after the other; features of `stores`, which change on the way. Returns their tokens."""
    waiting = list(stores)
    first, second, third, fourth = requests = [pair.request() for _ in range(4)]
    rounds = [
        [(first, 100)],
        # Far shorter than the one before: nothing of that may show.
        [(second, 5)],
        # Behind what is cached, and of several requests at once.
        [(first, 1), (second, 61), (third, 30)],
        [(third, 1)],
        # Too many for a graph, but for the fixed shape, which takes one after the other.
        [(first, 150), (second, 180), (third, 200), (fourth, 200)],
        [(fourth, 3), (second, 2)],
        [(third, 20)],
    ]
    for number, chunks in enumerate(rounds):
        if number % 3 == 0 and waiting:
            pair.store_features(waiting.pop(0))
        pair.run(*chunks)
    return sum(request.cached_len for request in requests)
