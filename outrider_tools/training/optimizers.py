"""What moves the weights: AdamW, or Muon for matrices with AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider_tools.training.learner import Learner
from outrider_tools.training.options import OPTIMIZERS, TrainerOptions

_AVERAGE = "average."

Optimizers = list[torch.optim.Optimizer]


def make_optimizers(learner: Learner, options: TrainerOptions) -> Optimizers:
    """Every group has its peak learning rate as "peak".

    Raises:
        ConfigError: an unknown optimizer.
    """
    if options.optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer {options.optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    groups = learner.groups(options)
    for group in groups:
        group["params"] = list(group["params"])
    muon = options.optimizer == "muon"
    matrices = [group for group in groups if muon and group.get("kind") == "matrix"]
    others = [group for group in groups if not (muon and group.get("kind") == "matrix")]
    found: Optimizers = [_adamw(others, options)] if others else []
    if matrices:
        share = options.muon_learning_rate / options.learning_rate
        for group in matrices:
            group["peak"] *= share
        rate = options.muon_learning_rate
        found.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return found


def _adamw(groups: list[dict[str, Any]], options: TrainerOptions) -> torch.optim.AdamW:
    fused = True if groups[0]["params"][0].is_cuda else None
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)


class Average:
    """A running average of the weights that forgets: of each step it keeps `share`."""

    def __init__(self, weights: Sequence[Tensor], share: float) -> None:
        """Raises ConfigError for a share that is no average."""
        if not 0.0 < share < 1.0:
            raise ConfigError(f"average {share}: choose a share between 0 and 1, as 0.999, or 0 for none")
        self._share = share
        self._steps = 0
        self._averages = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def add(self, weights: Sequence[Tensor]) -> None:
        """The weights after a step."""
        self._steps += 1
        # Until there are enough steps, their plain mean.
        share = min(self._share, 1.0 - 1.0 / self._steps)
        torch._foreach_lerp_(self._averages, list(weights), 1.0 - share)

    @torch.no_grad()
    def give(self, weights: Sequence[Tensor]) -> None:
        """Overwrite the weights by their averages."""
        torch._foreach_copy_(list(weights), self._averages)

    def state(self) -> dict[str, Tensor]:
        """What `load` takes."""
        found = {f"{_AVERAGE}{number}": average for number, average in enumerate(self._averages)}
        return found | {f"{_AVERAGE}steps": torch.tensor(self._steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take its own tensors out of a state."""
        self._steps = int(state.pop(f"{_AVERAGE}steps"))
        for number, average in enumerate(self._averages):
            average.copy_(state.pop(f"{_AVERAGE}{number}"))
