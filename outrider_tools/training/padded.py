"""Batches as padded rectangles on a device, however they were laid out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider_tools.training.texts import LENGTH_STEP, TextBatch


def on_device(batch: TextBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids, int64 [B, T], and the places of targets in the flattened [B * T], int64 [R]."""
    token_ids, places = batch.token_ids, batch.targets[: batch.num_targets]
    if batch.bounds is not None:
        token_ids, places = _cut(token_ids[0], places, batch.bounds)
    return (
        torch.from_numpy(token_ids).to(device, non_blocking=True),
        torch.from_numpy(places).to(device, non_blocking=True),
    )


def _cut(
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
    places: np.ndarray[tuple[int], np.dtype[np.int64]],
    bounds: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Sequences that lie one after the other, each in a row of its own; those without targets are left out."""
    owners = np.searchsorted(bounds, places, "right") - 1
    kept, rows = np.unique(owners, return_inverse=True)
    starts, ends = bounds[kept].astype(np.int64), bounds[kept + 1].astype(np.int64)
    width = -(-int((ends - starts).max()) // LENGTH_STEP) * LENGTH_STEP
    found = np.zeros((len(kept), width), np.int64)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        found[row, : end - start] = tokens[start:end]
    return found, places - starts[rows] + rows * width
