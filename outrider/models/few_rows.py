"""Forwards of few rows on a CPU, all layers in one function (kernels.cpu.stack), where a model's layers allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.stack import MAX_ROWS, DecoderStack, LayerWeights, StackPlan, StackShape
from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.rotary import Rotary
from outrider.models.config import ModelConfig


class Layer(Protocol):
    """A decoder layer."""

    def __call__(self, stream: Tensor, plan: AttentionPlan) -> Tensor:
        """The residual stream [M, hidden] after the layer."""

    def run(self, rows: Tensor, stream: Tensor, plan: AttentionPlan) -> Tensor:
        """The same where attention takes `rows` [M, any]."""

    def finish_loading(self) -> None:
        """Called once when the weights are filled."""

    def few_rows(self, config: ModelConfig) -> tuple[StackShape, LayerWeights] | None:
        """What kernels.cpu.stack needs of the layer; None if it does not do what the layer does."""


class LayerStack:
    """The decoder layers of a model or a head, each with its part of the KV cache, run in the fastest way there is."""

    def __init__(self, layers: Sequence[Layer], config: ModelConfig, rotary: Rotary) -> None:
        """`layers` may be filled later, before `finish_loading`."""
        self.layers, self._config, self._rotary = layers, config, rotary
        self._few: DecoderStack | None = None

    def finish_loading(self) -> None:
        """Called once when all weights are filled."""
        for layer in self.layers:
            layer.finish_loading()
        self._few = _stack(self.layers, self._config)

    @property
    def steady_rows(self) -> int:
        """See LanguageModel."""
        return 0 if self._few is None else MAX_ROWS

    def __call__(
        self,
        stream: Tensor,
        batch: TokenBatch,
        kv: KVCache,
        attention: AttentionBackend,
        wanted: Sequence[int] = (),
        given: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The residual stream [M, hidden] behind all layers, and as it enters each of the layers `wanted`.

        `given` [M, any]: what the first layer's attention takes in place of the normed stream.
        """
        few = self.plan(batch, kv)
        if few is not None:
            return self._run_few(few, stream.clone(), wanted, given)
        plan = attention.plan(batch, kv, self._config.num_heads, self._rotary)
        found: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if number in wanted:
                found[number] = stream
            stream = layer(stream, plan) if number or given is None else layer.run(given, stream, plan)
        return stream, found

    @property
    def few_shape(self) -> StackShape | None:
        """Of the function; None where there is none."""
        return None if self._few is None else self._few.shape

    def plan(self, batch: TokenBatch, kv: KVCache) -> StackPlan | None:
        """The batch as the function takes it; None where it does not."""
        if self._few is None or batch.token_ids.numel() > MAX_ROWS or kv.k.dtype != torch.bfloat16:
            return None
        found = batch.queries()
        if found is None:
            return None
        positions = batch.positions.long()
        # In bfloat16, as rotations of many rows have them.
        angles = self._rotary.tables(positions, torch.bfloat16)
        return self._few.plan(*found, positions, angles, (kv.k_layers, kv.v_layers))

    def _run_few(
        self, plan: StackPlan, stream: Tensor, wanted: Sequence[int], given: Tensor | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        taps = {number: torch.empty_like(stream) for number in wanted if number < len(self.layers)}
        plan.run(stream, taps, given)
        return stream, taps


def _stack(layers: Sequence[Layer], config: ModelConfig) -> DecoderStack | None:
    """The function for loaded layers; None where there is none for their shapes, weights or rules."""
    found = [few for layer in layers if (few := layer.few_rows(config)) is not None]
    shapes = {shape for shape, _ in found}
    if len(found) < len(layers) or len(shapes) != 1:
        return None
    shape = shapes.pop()
    return DecoderStack(shape, [weights for _, weights in found]) if shape.fits else None
