"""How an EAGLE-3 head learns: its unrolled steps against the target's own distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_tools.training.compiling import compiler
from outrider_tools.training.dense import target_states
from outrider_tools.training.eagle3 import Eagle3Head
from outrider_tools.training.eagle3_packed import PackedUnroll, pick_rows
from outrider_tools.training.loss import Teaching, Wanted
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.packed_attention import Spans
from outrider_tools.training.packed_states import span_states
from outrider_tools.training.target import Target
from outrider_tools.training.texts import TextBatch


class Eagle3Learner:
    """See Learner."""

    def __init__(
        self,
        target: Target,
        head: Eagle3Head,
        options: TrainerOptions,
        *,
        packed: bool | None = None,
        compiled: bool | None = None,
    ) -> None:
        """Without `packed` and `compiled`, the options decide on a GPU; a CPU does without both."""
        self.module = head
        on_gpu = target.device.type == "cuda" and target.dtype == torch.bfloat16
        self.packed = on_gpu and options.packed if packed is None else packed
        self._target = target
        self._num_steps = options.unroll
        wrap = compiler(on_gpu and options.compile and self.packed if compiled is None else compiled)
        self._teaching = Teaching(wrap, options.hit_weight)
        self._unroll = PackedUnroll(head, target.rotary, wrap)
        self._finish = wrap(head.norm)

    def prepare(self, batch: TextBatch) -> None:
        """Fit the head's scale of features to those of a batch."""
        places = torch.from_numpy(batch.targets[: batch.num_targets]).to(self._target.device)
        token_ids, spans = self._tokens(batch)
        features, _ = self._states(token_ids, spans)
        self.module.calibrate(features.flatten(0, -2)[places])

    def losses(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """See Learner."""
        target, head = self._target, self.module
        token_ids, spans = self._tokens(batch)
        places, counts = self._places(batch)
        features, wanted = self._taught(token_ids, spans, places, counts)
        count = counts.sum(dtype=torch.float32)
        losses, rates = [], []
        with target.autocast():
            for step, feature in enumerate(self._features(token_ids, features, spans)):
                # The target's word at place i is what the head says at base i - 1 when it has run one step more.
                rows = self._finish(pick_rows(feature.flatten(0, -2), *places.at(step)))
                loss, hits = self._teaching.loss(rows, head.lm_head.weight, wanted, count)
                losses.append(loss)
                rates.append(hits.sum() / count)
        return torch.stack(losses), torch.stack(rates)

    def look(self, batch: TextBatch) -> None:
        """The target's part of `losses` alone, to be timed."""
        self._taught(*self._tokens(batch), *self._places(batch))

    def groups(self, options: TrainerOptions) -> list[dict[str, Any]]:
        """See Learner."""
        head, peak = self.module, options.learning_rate
        new = [*head.fc.parameters(), *head.midlayer.parameters()]
        given = [*head.lm_head.parameters(), *head.norm.parameters()]
        return [
            {"params": [weight for weight in new if weight.dim() == 2], "peak": peak, "kind": "matrix"},
            {"params": [weight for weight in new if weight.dim() != 2], "peak": peak, "kind": "other"},
            {"params": given, "peak": peak * options.output_share, "kind": "other"},
        ]

    def _put(self, values: NDArray[Any]) -> Tensor:
        source = torch.from_numpy(values)
        if self._target.device.type == "cuda":
            # Copies from other memory wait for all that was asked of the GPU before.
            source = source.pin_memory()
        return source.to(self._target.device, non_blocking=True)

    def _tokens(self, batch: TextBatch) -> tuple[Tensor, Spans | None]:
        """Token ids [B, T] or, with spans, [M]."""
        token_ids = self._put(batch.token_ids)
        if batch.bounds is None:
            return token_ids, None
        return token_ids[0], Spans.of(self._put(batch.bounds), token_ids.shape[1], batch.longest)

    def _places(self, batch: TextBatch) -> tuple[_Places, Tensor]:
        """Of the targets, and bool [R]: which of them count."""
        size, count = batch.targets.size, batch.num_targets
        found = np.full(batch.token_ids.size + self._num_steps + 1, size, np.int64)
        found[batch.targets[:count]] = np.arange(count)
        parts = self._put(np.concatenate([batch.targets, np.arange(size) < count, found])).split(
            (size, size, found.size)
        )
        return _Places(parts[0], parts[2], batch.token_ids.size), parts[1].bool()

    def _taught(self, token_ids: Tensor, spans: Spans | None, places: _Places, counts: Tensor) -> tuple[Tensor, Wanted]:
        """The target's features, and what it says at the targets."""
        head, model = self.module, self._target.model
        features, hidden = self._states(token_ids, spans)
        hidden = hidden.flatten(0, -2).index_select(0, places.targets)
        return features, self._teaching.wanted(model, hidden, head.target_ids, head.draft_ids, counts)

    def _states(self, token_ids: Tensor, spans: Spans | None) -> tuple[Tensor, Tensor]:
        layers = self.module.shape.feature_layers
        if spans is None:
            return target_states(self._target.model, token_ids, layers)
        return span_states(self._target.model, token_ids, spans, layers)

    def _features(self, token_ids: Tensor, features: Tensor, spans: Spans | None) -> Iterator[Tensor]:
        target = self._target
        embedded = target.embed(token_ids)
        if spans is None:
            return self.module.unroll(features, embedded, target.rotary, self._num_steps)
        return self._unroll.steps(features, embedded, spans, self._num_steps)


@dataclass(frozen=True, slots=True)
class _Places:
    """Of a batch's targets [R] among its `size` tokens, and of each token among the targets."""

    targets: Tensor
    found: Tensor
    size: int

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Bases that an unrolled step is asked at [R], and where each base [size] is among them, R for nowhere."""
        return self.targets - 1 - step, self.found[1 + step : 1 + step + self.size]
