"""What a draft service needs of kernels to grow trees on a device: the choice of nodes, and their places."""

from __future__ import annotations

from kernels.frontier import append_candidates, begin_burst, choose_entries, place_entries
from kernels.frontier_state import (
    BASE,
    FEATURE,
    FORCED_FROM,
    HEADER_WORDS,
    NUM_FIELDS,
    PARENT,
    POSITION,
    ROW,
    SCORE,
    SLOT,
    TOKEN,
    BurstRows,
    Pool,
    RegionPlan,
    StepTokens,
)

__all__ = [
    "BASE",
    "FEATURE",
    "FORCED_FROM",
    "HEADER_WORDS",
    "NUM_FIELDS",
    "PARENT",
    "POSITION",
    "ROW",
    "SCORE",
    "SLOT",
    "TOKEN",
    "BurstRows",
    "Pool",
    "RegionPlan",
    "StepTokens",
    "append_candidates",
    "begin_burst",
    "choose_entries",
    "place_entries",
]
