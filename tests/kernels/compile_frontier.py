"""Compiles the kernels around a draft step. See compile_only.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.frontier_state import NUM_FIELDS, REROOT_WORDS, SEED_HEADER_WORDS, CandidatePool, StepTokens

if TYPE_CHECKING:
    from frontier_burst import Burst

# A draft service's.
_REGION, _BRANCHING, _MAX_SEEDS, _MAX_STEPS, _MORE = 512, 8, 768, 32, 64


def _burst(width: int) -> Burst:
    """One whose pool is as large as a draft service's."""
    from frontier_burst import Burst, Entry

    burst = Burst([Entry(0, 3, 0.0, 5)], [[1, 2, 3], [4]], width, region=_REGION, device="cpu")
    capacity = _MAX_SEEDS + _MAX_STEPS * width * _BRANCHING
    burst.seeds = torch.zeros(NUM_FIELDS, _MAX_SEEDS, dtype=torch.int32)
    burst.pool = CandidatePool(torch.zeros(NUM_FIELDS, capacity, dtype=torch.int32), _MAX_SEEDS)
    burst.step = StepTokens.new(width, 2, _REGION // 32, torch.device("cpu"), capacity)
    burst.results = torch.zeros(_MAX_STEPS, width * (2 + 2 * _BRANCHING), dtype=torch.int32)
    return burst


def main() -> None:
    """Call every launcher once; each launch is a compilation."""
    from kernels.jit import frontier

    width = 64
    burst = _burst(width)
    reroots = torch.zeros(2, REROOT_WORDS + _REGION, dtype=torch.int32)
    frontier.begin_burst(burst.header, burst.seeds, burst.pool, burst.rows, burst.plan)
    frontier.reroot_pool(burst.header, burst.pool, burst.rows, burst.plan, reroots, width * _BRANCHING)
    frontier.add_seeds(burst.pool, torch.zeros(SEED_HEADER_WORDS + NUM_FIELDS * _MORE, dtype=torch.int32))
    frontier.choose_entries(burst.header, burst.pool, burst.rows, burst.step, _BRANCHING)
    frontier.place_entries(burst.pool, burst.rows, burst.step, burst.plan)
    tokens = torch.zeros(width, _BRANCHING, dtype=torch.int32)
    scores = torch.zeros(width, _BRANCHING)
    frontier.append_candidates(burst.header, burst.pool, burst.step, tokens, scores, burst.results)
