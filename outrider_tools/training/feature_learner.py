"""How heads on the target's last hidden state learn: their unrolled steps against what the target says and computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.weights import TensorReader
from outrider_tools.training.dense import target_states
from outrider_tools.training.feature_head import FeatureHead
from outrider_tools.training.loss import soft_cross_entropy, wanted_at
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.padded import on_device
from outrider_tools.training.target import Target
from outrider_tools.training.texts import TextBatch


class FeatureLearner:
    """See Learner. The output matrix is the target's, and stays as it is."""

    module: nn.Module
    packed = False

    def __init__(self, target: Target, head: FeatureHead, unroll: int, feature_weight: float) -> None:
        """`feature_weight`: of the smooth L1 distance to the target's own features, beside the cross-entropy."""
        self.module = self._head = head
        self._target = target
        self._unroll = unroll
        self._feature_weight = feature_weight
        self._output = output_matrix(target).to(target.device, target.dtype)
        self._ids = torch.arange(target.config.vocab_size, device=target.device)

    def prepare(self, batch: TextBatch) -> None:
        """Fit the head to the sizes of features and embeddings."""
        token_ids, places = on_device(batch, self._target.device)
        features, _ = target_states(self._target.model, token_ids, (self._target.config.num_layers + 1,))
        embedded = self._target.embed(token_ids)
        self._head.calibrate(features.flatten(0, 1)[places], embedded.flatten(0, 1)[places])

    def losses(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """See Learner."""
        target = self._target
        token_ids, places = on_device(batch, target.device)
        features, hidden = target_states(target.model, token_ids, (target.config.num_layers + 1,))
        true = hidden.flatten(0, 1).index_select(0, places)
        wanted = wanted_at(target.model, true, self._ids, self._ids)
        losses, rates = [], []
        with target.autocast():
            unrolled = self._head.unroll(features, target.embed(token_ids), target.rotary, self._unroll)
            for step, feature in enumerate(unrolled):
                # What the head computes at base i - 1, a step more for each, stands for the hidden state of place i.
                rows = feature.flatten(0, 1).index_select(0, places - 1 - step)
                loss, hits = soft_cross_entropy(rows, self._output, wanted)
                if self._feature_weight:
                    loss = loss + self._feature_weight * _distance(rows, true)
                losses.append(loss)
                rates.append(hits.float().mean())
        return torch.stack(losses), torch.stack(rates)

    def groups(self, options: TrainerOptions) -> list[dict[str, Any]]:
        """See Learner."""
        return groups_of(list(self.module.parameters()), options.learning_rate)


def output_matrix(target: Target) -> Tensor:
    """The target's output matrix [vocabulary, hidden], on the CPU and in its file's dtype."""
    with TensorReader(target.folder) as reader:
        return reader.tensor("model.embed_tokens.weight" if target.config.tie_embeddings else "lm_head.weight")


def groups_of(parameters: list[nn.Parameter], peak: float) -> list[dict[str, Any]]:
    """Optimizer groups as Learner.groups has them: matrices, and the rest."""
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    others = [parameter for parameter in parameters if parameter.dim() != 2]
    found = ((matrices, "matrix"), (others, "other"))
    return [{"params": params, "peak": peak, "kind": kind} for params, kind in found if params]


def _distance(feature: Tensor, true: Tensor) -> Tensor:
    """Smooth L1 between own and true features [R, hidden], each channel in units of its own size: a scalar."""
    scale = true.float().square().mean(0).sqrt().clamp_(min=1e-3)
    return functional.smooth_l1_loss(feature.float() / scale, true.float() / scale)
