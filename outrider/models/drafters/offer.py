"""What of a draft model's work verify may do before features are stored and sent."""

from __future__ import annotations

import torch

from outrider.models.drafters.base import DraftModel
from outrider.tree.projection import MAX_PROJECTION_BYTES, Projection, name_projection


def offered_projection(model: DraftModel) -> Projection | None:
    """The model's projection on the host, if it makes features smaller and is of a shape and size that verify takes."""
    matrix = model.projection()
    if matrix is None:
        return None
    num_columns, width = matrix.shape
    if num_columns >= width or num_columns > model.hidden_size or num_columns % 2:
        return None
    if matrix.numel() * matrix.element_size() > MAX_PROJECTION_BYTES:
        return None
    data = matrix.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    layers, dtype = tuple(model.feature_layers), str(matrix.dtype).removeprefix("torch.")
    return Projection(layers, num_columns, dtype, data, name_projection(layers, num_columns, dtype, data))
