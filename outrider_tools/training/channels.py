"""The sizes of channels of features and embeddings, which differ a hundredfold in some targets."""

from __future__ import annotations

from torch import Tensor

# The least that a channel counts for, so that one without content is not blown up.
MIN_SIZE = 1e-3


def channel_sizes(rows: Tensor, least: float = MIN_SIZE) -> Tensor:
    """Root mean square of each channel over rows [N, C], and no less than `least`: float32 [C]."""
    return rows.float().square().mean(0).sqrt().clamp_(min=least)


def levelling_weight(sizes: Tensor) -> Tensor:
    """[C]: the weight of an RMS norm from which channels of these sizes [C] come out alike.

    The norm itself divides all channels by one number.
    """
    return sizes.square().mean().sqrt() / sizes
