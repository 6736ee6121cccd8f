"""Memory of a round before its first launch."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from kernels.sampling_state import SampleBuffers
from outrider.attention.paged import TreeBuffers


def test_buffers_of_a_round_hold_zeros_at_first() -> None:
    # A pass without launches writes to slots and looks up tokens that nothing has filled in.
    def fresh() -> list[Tensor]:
        trees, sample = TreeBuffers(8, 4, torch.device("cpu")), SampleBuffers.new(4, 50, "cpu")
        made = [*vars(trees).values(), *(getattr(sample, field.name) for field in fields(sample))]
        return [tensor for tensor in made if isinstance(tensor, Tensor)]

    torch.use_deterministic_algorithms(True)
    try:
        # Uninitialized memory holds the largest integer, or nan, meanwhile.
        assert int(torch.empty(1, dtype=torch.int32)) > 0
        assert all(not tensor.any() for tensor in fresh())
    finally:
        torch.use_deterministic_algorithms(False)
