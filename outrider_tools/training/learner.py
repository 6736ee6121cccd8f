"""What the trainer asks of a drafter: its weights, and how they learn from a batch."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.texts import TextBatch


class Learner(Protocol):
    """A drafter and the way it learns. One trainer works with any of them.

    Attributes:
        packed: whether it wants batches of one shape, with `bounds` (packing.PackedBatches), or padded rectangles.
    """

    packed: bool

    @property
    def module(self) -> nn.Module:
        """What is trained, on its device. Its state_dict, buffers included, is what a state on disk holds."""

    def prepare(self, batch: TextBatch) -> None:
        """Called once before the first step of a training that begins anew. The first rank's result is that of all."""

    def losses(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """The loss of each step that the drafter runs on itself, float32 [steps], with what backward needs; and the
        share of the batch's targets where the likeliest tokens agree, float32 [steps].

        The trainer sums the losses with weights that `decay` gives, and runs backward.
        """

    def groups(self, options: TrainerOptions) -> list[dict[str, Any]]:
        """Optimizer groups: `params`, a list of the module's parameters that learn; `peak`, their highest learning
        rate; `kind`, "matrix" for 2-D weights that Muon may take, else "other". Every parameter is in one group."""
