"""Compilation of a training step's pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# One variant for each number of own keys, and a few for each number of targets.
MAX_VARIANTS = 64


def compiler(on: bool) -> Callable[[Any], Any]:
    """What turns a piece into a compiled one of fixed shapes; leaves it as it is unless `on`."""
    if not on:
        return lambda piece: piece
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    return lambda piece: torch.compile(piece, dynamic=False, fullgraph=True)
